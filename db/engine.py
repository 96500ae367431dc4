"""The one door to the database: open it and it is migrated, and filled if it is new."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from db.database import Database, connect, resolve_url
from db.models import MeasurementRow
from db.recorded import RECORDED_DIRECTORY, load_recorded
from db.types import Origin
from db.upgrade import upgrade

__all__ = ["Database", "open_database"]


def open_database(
    url: str | None = None, *, recorded: Path | None = RECORDED_DIRECTORY
) -> Database:
    """Open a database, migrated to this version; raises DatabaseProblem.

    Without `url` it is the one of `$PEAKMARK_DATABASE_URL`, else `var/peakmark.db` here. One that
    holds no recorded measurements yet is filled with those of the directory `recorded`.
    """
    place = resolve_url(url)
    upgrade(place)
    database = Database(engine=connect(place), url=place)
    if recorded is not None and not _holds_recorded(database):
        load_recorded(database, recorded)
    return database


def _holds_recorded(database: Database) -> bool:
    query = select(MeasurementRow.id).where(MeasurementRow.origin == Origin.RECORDED).limit(1)
    with database.read() as session:
        return session.scalars(query).first() is not None
