"""The one door to the database: open it and it is migrated and filled."""

from __future__ import annotations

from db.database import Database, connect, resolve_url

__all__ = ["Database", "open_database"]


def open_database(url: str | None = None) -> Database:
    """Open the database at `url`, migrated to this version; raises DatabaseProblem."""
    place = resolve_url(url)
    return Database(engine=connect(place), url=place)
