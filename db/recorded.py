"""Loads measurements recorded on real GPUs (`recorded/*.jsonl`) into the database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.database import Database
from db.measurements import insert_measurement
from db.models import MeasurementRow
from db.types import Origin, Role, RunKind, RunState, RunWorld
from db.views import Measurement
from planner.records import RecordError, bounded_lines, check_length, parse_row

RECORDED_DIRECTORY = Path(__file__).parents[1] / "recorded"
WITHDRAWN_FILE = "withdrawn.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of the rows: how many are new, how many were known, what is wrong with others."""

    loaded: int
    known: int
    problems: tuple[str, ...]


def load_recorded(database: Database, directory: Path = RECORDED_DIRECTORY) -> LoadReport:
    """Load every `*.jsonl` file of a directory; rows already there are left alone.

    Rows that were recorded elsewhere and have been withdrawn since are removed: what they measured
    is no longer what runs.
    """
    report = load_files(database, sorted(directory.glob("*.jsonl")))
    _remove_withdrawn(database, directory / WITHDRAWN_FILE)
    return report


def _remove_withdrawn(database: Database, file: Path) -> None:
    if not file.exists():
        return
    withdrawals = json.loads(file.read_text(encoding="utf-8"))["withdrawals"]
    ids = [row_id for withdrawal in withdrawals for row_id in withdrawal["ids"]]
    withdrawn = MeasurementRow.origin == Origin.RECORDED, MeasurementRow.row_id.in_(ids)
    with database.write() as session:
        session.execute(delete(MeasurementRow).where(*withdrawn))


def load_files(database: Database, files: list[Path]) -> LoadReport:
    """Load files of recorded rows in one transaction.

    A line that cannot be used is reported by file and line, and does not hold up the others.
    """
    problems: list[str] = []
    rows = [row for file in files for row in _read_rows(file, problems)]
    with database.write() as session:
        loaded = sum(_insert_if_new(session, row) for row in rows)
    return LoadReport(loaded=loaded, known=len(rows) - loaded, problems=tuple(problems))


def _read_rows(file: Path, problems: list[str]) -> Iterator[Measurement]:
    try:
        with file.open(encoding="utf-8") as text:
            yield from _rows_of(file.name, bounded_lines(text), problems)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(f"{file.name} cannot be read: {reason}.")
    except RecordError as error:
        problems.append(f"{error} No more of that file was read.")


def _rows_of(name: str, lines: Iterable[str], problems: list[str]) -> Iterator[Measurement]:
    """Yield the rows that can be used; raises RecordError at a line that is too long to read on."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        check_length(line, place)
        try:
            row = _parse(line)
        except RecordError as error:
            problems.append(f"{place}: {error}")
        except (ValueError, RecursionError):
            problems.append(f"{place}: the line is not JSON.")
        else:
            yield row


def _parse(line: str) -> Measurement:
    row = parse_row(json.loads(line))
    try:
        outcome = RunState(row.outcome)
    except ValueError:
        raise RecordError("outcome", f"outcome {row.outcome!r} is not known.") from None
    world = row.spec.get("world")
    if world not in set(RunWorld):
        raise RecordError("spec.world", f"spec.world {world!r} is not known.")
    return Measurement(
        id=row.id,
        kind=RunKind(row.kind.value),
        recorded_at=row.recorded_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        role=Role(row.role.value),
        spec=dict(row.spec),
        outcome=outcome,
        measured=dict(row.measured),
        environment=dict(row.environment),
        origin=Origin.RECORDED,
        run_id=None,
    )


def _insert_if_new(session: Session, row: Measurement) -> bool:
    known = select(MeasurementRow.id).where(MeasurementRow.row_id == row.id)
    if session.scalars(known).first() is not None:
        return False
    insert_measurement(session, row)
    return True
