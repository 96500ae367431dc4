"""The database as the commands use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from db.engine import Database
    from planner.records import RecordedRow


@contextmanager
def opened_database() -> Iterator[Database]:
    """Open the database for one command; raises DatabaseProblem."""
    from db.engine import open_database

    database = open_database()
    try:
        yield database
    finally:
        database.close()


def stored_rows(database: Database, *, made_here: bool = False) -> list[RecordedRow]:
    """Return the measurements of the database as recorded rows: all, or those made here."""
    from db.measurements import measurements
    from db.types import Origin
    from planner.records import parse_row

    found = measurements(database)
    return [
        parse_row(seen.to_row()) for seen in found if not made_here or seen.origin is Origin.HERE
    ]
