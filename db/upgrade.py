"""Bring a database to the tables of this version, without losing a row of what is there."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import URL, Connection, Engine, func, inspect, select, table, text

from db.database import connect, display_name, resolve_url, sqlite_file
from db.problems import DatabaseProblem, translated
from db.types import now_ms

# Alembic takes half of the time in which a database is opened, and nearly all are of the newest revision:
# it is imported where one is not.
if TYPE_CHECKING:
    from alembic.config import Config

# Any number that no other program's advisory lock on the same server is likely to have.
_SERVER_LOCK = 0x7065616B
_VERSION_TABLE = "alembic_version"
MIGRATIONS = Path(__file__).parent / "migrations"


def migration_config(connection: Connection | None = None, scripts: Path = MIGRATIONS) -> Config:
    """Return the Alembic configuration that runs `scripts` on `connection`."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.attributes["connection"] = connection
    return config


def upgrade(url: URL, *, scripts: Path = MIGRATIONS) -> None:
    """Migrate the database to the newest revision.

    An existing file is copied beside itself first. Raises DatabaseProblem with one sentence when
    the file cannot be written, is not ours or comes from a newer version.
    """
    name = display_name(url)
    file = sqlite_file(url)
    if file is not None:
        _require_writable(file)
    engine = connect(url, foreign_keys=False)
    try:
        with translated(name), _upgrade_lock(engine, file):
            _upgrade_locked(engine, name, file, scripts)
    finally:
        engine.dispose()


def newest_revision(scripts: Path = MIGRATIONS) -> str:
    """Return the revision to which `scripts` lead: files are named by their revision, as r0001_first_tables.py."""
    return max(path.name[1:5] for path in (scripts / "versions").glob("r[0-9]*.py"))


def _upgrade_locked(engine: Engine, name: str, file: Path | None, scripts: Path) -> None:
    with engine.connect() as connection:
        tables = inspect(connection).get_table_names()
        is_ours = _VERSION_TABLE in tables
        current = (
            connection.scalar(text(f"SELECT version_num FROM {_VERSION_TABLE}"))
            if is_ours
            else None
        )
    if current == newest_revision(scripts):
        return
    _require_ours(scripts, current, tables, name)
    if file is not None and current is not None:
        _back_up(engine, file, current)
    with engine.execution_options(writes=True).begin() as connection:
        _migrate(connection, name, scripts)


def _require_writable(file: Path) -> None:
    if file.is_dir():
        raise DatabaseProblem(f"The database {file} is a folder: name a file.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseProblem(
            f"The folder {file.parent} for the database cannot be made: {error.strerror}."
        ) from error
    if not os.access(file.parent, os.W_OK, effective_ids=True):
        raise DatabaseProblem(
            f"The folder {file.parent} of the database is read-only: make the folder writable."
        )
    if file.exists() and not os.access(file, os.W_OK, effective_ids=True):
        raise DatabaseProblem(f"The database {file} is read-only: make the file writable.")


def _require_ours(scripts: Path, current: str | None, tables: list[str], name: str) -> None:
    from alembic.script import ScriptDirectory

    directory = ScriptDirectory.from_config(migration_config(scripts=scripts))
    known = {script.revision for script in directory.walk_revisions()}
    if current is not None and current not in known:
        raise DatabaseProblem(
            f"The database {name} was written by a newer version of Peakmark (revision {current}): "
            "update Peakmark or choose another database."
        )
    if current is None and set(tables) - {_VERSION_TABLE}:
        raise DatabaseProblem(
            f"The database {name} holds tables of another program: choose another database."
        )


def _migrate(connection: Connection, name: str, scripts: Path) -> None:
    from alembic import command

    before = _row_counts(connection)
    command.upgrade(migration_config(connection, scripts), "head")
    after = _row_counts(connection)
    # Rebuilding a table of an SQLite database can delete its children's rows without a word.
    harmed = {table for table, rows in before.items() if after.get(table, rows) < rows}
    if connection.dialect.name == "sqlite":
        harmed |= {row[0] for row in connection.execute(text("PRAGMA foreign_key_check"))}
    if harmed:
        raise DatabaseProblem(
            f"The database {name} was left as it was: the upgrade would have lost rows of "
            f"{', '.join(sorted(harmed))}."
        )


def _row_counts(connection: Connection) -> dict[str, int]:
    counts = {}
    for name in inspect(connection).get_table_names():
        counts[name] = connection.scalar(select(func.count()).select_from(table(name))) or 0
    return counts


def _back_up(engine: Engine, file: Path, revision: str) -> None:
    """Copy the database by SQLite itself: a copy of the file would miss what lies in the WAL."""
    backup = file.with_name(f"{file.name}.{revision}-{now_ms()}.backup")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("VACUUM INTO ?", (str(backup),))


@contextmanager
def _upgrade_lock(engine: Engine, file: Path | None) -> Iterator[None]:
    """Let one process migrate a database at a time."""
    if file is not None:
        with file.with_name(f"{file.name}.upgrade.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        return
    with engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_SERVER_LOCK)))
        yield


def main() -> int:
    """Upgrade the database of this environment: `python -m db.upgrade`."""
    try:
        upgrade(resolve_url(None))
    except DatabaseProblem as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
