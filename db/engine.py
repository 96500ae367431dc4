"""The one door to the database: open it and it is migrated, and filled if it is new."""

from __future__ import annotations

from pathlib import Path

from db.database import Database, connect, resolve_url
from db.recorded import RECORDED_DIRECTORY, load_recorded
from db.upgrade import upgrade

__all__ = ["Database", "open_database"]


def open_database(
    url: str | None = None, *, recorded: Path | None = RECORDED_DIRECTORY
) -> Database:
    """Open a database, migrated to this version; raises DatabaseProblem.

    Without `url` it is the one of `$PEAKMARK_DATABASE_URL`, else `var/peakmark.db` here. A new
    database is filled with the measurements of the directory `recorded`.
    """
    place = resolve_url(url)
    is_new = upgrade(place)
    database = Database(engine=connect(place), url=place)
    if is_new and recorded is not None:
        load_recorded(database, recorded)
    return database
