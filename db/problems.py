"""What can be wrong with a database, each as one sentence a person can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError


class DatabaseProblem(Exception):  # noqa: N818 - read by people, not an error of ours
    """The database cannot be used; `str()` is one sentence that says why and what to do.

    `passing` is true where waiting can help (locked, full): the caller may try again.
    """

    def __init__(self, sentence: str, *, passing: bool = False) -> None:
        self.passing = passing
        super().__init__(sentence)


# What the SQLite driver says, what we say, and whether waiting can help.
_SENTENCES = (
    ("readonly database", "is read-only: make the file and its folder writable", False),
    ("database or disk is full", "cannot grow because the disk is full: free some space", True),
    ("disk i/o error", "cannot be read or written: the disk reports an error or is full", True),
    ("file is not a database", "is not an SQLite database: choose another file", False),
    ("malformed", "is damaged: restore the backup that lies beside it", False),
    ("unable to open", "cannot be opened: check that its folder exists and is writable", False),
    ("locked", "is locked by another program: close it or try again", True),
)


def describe_problem(name: str, error: BaseException) -> DatabaseProblem:
    """Translate a driver's error about the database called `name` into one sentence."""
    text = str(getattr(error, "orig", None) or error).strip()
    for pattern, sentence, passing in _SENTENCES:
        if pattern in text.lower():
            return DatabaseProblem(f"The database {name} {sentence}.", passing=passing)
    first_line = text.splitlines()[0] if text else type(error).__name__
    return DatabaseProblem(f"The database {name} answered with an error: {first_line}.")


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Raise DatabaseProblem instead of a driver's error about the place; those about a statement pass."""
    try:
        yield
    except DBAPIError as error:
        if isinstance(error, IntegrityError | ProgrammingError | DataError):
            raise
        raise describe_problem(name, error) from error
