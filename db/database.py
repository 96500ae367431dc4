"""A connection to one database, with one way to read and one way to write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection as SqliteConnection

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from db.problems import DatabaseProblem, translated

URL_VARIABLE = "PEAKMARK_DATABASE_URL"
DATA_DIRECTORY = Path("var")
BUSY_TIMEOUT_MS = 10_000


def resolve_url(url: str | None) -> URL:
    """Return the URL given, else `$PEAKMARK_DATABASE_URL`, else `var/peakmark.db` here.

    A path without a scheme is taken as an SQLite file.
    """
    text = url or os.environ.get(URL_VARIABLE) or str(DATA_DIRECTORY / "peakmark.db")
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        return make_url(text)
    except ArgumentError as error:
        raise DatabaseProblem(
            f"{URL_VARIABLE} is not a database URL: it must look like sqlite:///var/peakmark.db "
            "or postgresql://user@host/name."
        ) from error


def sqlite_file(url: URL) -> Path | None:
    """Return the file of an SQLite URL; None for another database or one in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    return Path(str(url.database)).absolute()


def display_name(url: URL) -> str:
    """Name the database for a person: its file, or its URL without the password."""
    file = sqlite_file(url)
    return str(file) if file else url.render_as_string(hide_password=True)


def _connect_to_server(url: URL) -> Engine:
    try:
        return create_engine(url)
    except (ImportError, ArgumentError) as error:
        raise DatabaseProblem(
            f"The database {display_name(url)} needs a driver that is not installed: {error}."
        ) from error


def connect(url: URL, *, foreign_keys: bool = True) -> Engine:
    """Create an engine with the settings that every connection of ours has."""
    if url.get_backend_name() != "sqlite":
        return _connect_to_server(url)
    # isolation_level=None stops the driver from opening transactions behind our back.
    engine = create_engine(url, connect_args={"isolation_level": None, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def configure(connection: SqliteConnection, _: ConnectionPoolEntry) -> None:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its lock at once: a read that upgrades later fails without waiting.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """An opened, migrated database. Sessions are short: never held across a process or network."""

    engine: Engine
    url: URL

    @property
    def name(self) -> str:
        """The file or URL, as shown to a person."""
        return display_name(self.url)

    @property
    def data_directory(self) -> Path:
        """The folder for run directories and locks: beside the SQLite file, else `var` here."""
        file = sqlite_file(self.url)
        return file.parent if file else DATA_DIRECTORY.absolute()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a session that only reads; raises DatabaseProblem."""
        with translated(self.name), Session(self.engine, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session that holds the write lock and commits at the end, or undoes all of it."""
        writer = self.engine.execution_options(writes=True)
        with (
            translated(self.name),
            Session(writer, autoflush=False, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def close(self) -> None:
        """Close the pooled connections."""
        self.engine.dispose()
