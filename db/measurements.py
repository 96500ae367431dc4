"""Keeping what runs saw, and giving it back in the fields of the `recorded/` format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, joinedload

from db import queue
from db.database import Database
from db.models import EnvironmentRow, MeasurementRow, RunRow
from db.queue import Lease
from db.types import Origin, Role, RunKind, RunState, RunWorld, now_ms
from db.views import Measurement
from planner.records import row_id

_FIGURES = ("allocated_bytes", "reserved_bytes", "device_bytes", "step_time_s", "tokens_per_s")


_COLUMN_LIMIT = 2**63


def content_hash(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a document's canonical JSON (sorted keys, no spaces)."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """What a run left behind, to be stored with its final state."""

    state: RunState
    measured: Mapping[str, Any]
    environment: Mapping[str, Any]
    error: Mapping[str, Any] | None = None
    why: str | None = None
    exit_code: int | None = None


def store_result(database: Database, lease: Lease, result: StoredResult) -> None:
    """Store measurement, environment and final state in one transaction.

    Raises StaleLease when the run is no longer held, ValueError when a figure is NaN or infinite.
    """
    with database.write() as session:
        queue.finish(session, lease, result.state, why=result.why, exit_code=result.exit_code)
        run = session.get_one(RunRow, lease.run_id)
        measured, environment = dict(result.measured), dict(result.environment)
        seen = Measurement(
            id=row_id(run.spec, measured, environment),
            kind=run.kind,
            recorded_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            role=Role.EVIDENCE,
            outcome=result.state,
            origin=Origin.HERE,
            run_id=run.id,
            spec=run.spec,
            measured=measured,
            environment=environment,
        )
        insert_measurement(session, seen, result.error)


def insert_measurement(
    session: Session, seen: Measurement, error: Mapping[str, Any] | None = None
) -> None:
    """Add a measurement inside the caller's transaction."""
    session.add(
        MeasurementRow(
            row_id=seen.id,
            run_id=seen.run_id,
            environment_id=_keep_environment(session, seen.environment),
            origin=seen.origin,
            role=seen.role,
            kind=seen.kind,
            world=RunWorld(seen.spec["world"]),
            outcome=seen.outcome,
            spec=seen.spec,
            measured=seen.measured,
            error=None if error is None else dict(error),
            recorded_at=seen.recorded_at,
            **{name: _figure(seen.measured.get(name)) for name in _FIGURES},
        )
    )
    session.flush()


def _figure(value: object) -> float | None:
    """Return a number that a column can hold; the document keeps whatever else there was."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _COLUMN_LIMIT else None


def _keep_environment(session: Session, environment: Mapping[str, Any]) -> int:
    digest = content_hash(environment)
    same = select(EnvironmentRow.id).where(EnvironmentRow.hash == digest)
    known = session.scalars(same).first()
    if known is not None:
        return known
    gpu = environment.get("gpu")
    row = EnvironmentRow(
        hash=digest,
        document=dict(environment),
        gpu_name=str(gpu.get("name")) if isinstance(gpu, Mapping) else None,
        created_at_ms=now_ms(),
    )
    session.add(row)
    session.flush()
    return row.id


def measurements(database: Database, *, kinds: Sequence[RunKind] = ()) -> list[Measurement]:
    """List all measurements, made here or recorded elsewhere, oldest first."""
    query = (
        select(MeasurementRow)
        .options(joinedload(MeasurementRow.environment))
        .order_by(MeasurementRow.recorded_at, MeasurementRow.id)
    )
    if kinds:
        query = query.where(MeasurementRow.kind.in_(kinds))
    with database.read() as session:
        return [to_measurement(row) for row in session.scalars(query)]


def to_measurement(row: MeasurementRow) -> Measurement:
    """Return a row as plain data; its environment must be loaded or its session open."""
    return Measurement(
        id=row.row_id,
        kind=row.kind,
        recorded_at=row.recorded_at,
        role=row.role,
        spec=row.spec,
        outcome=row.outcome,
        measured=row.measured,
        environment=row.environment.document,
        origin=row.origin,
        run_id=row.run_id,
    )
