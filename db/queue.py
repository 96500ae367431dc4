"""The queue of runs: claims, leases and the only way a run changes its state.

A claim is one guarded UPDATE; its `lease_token` is a fencing token. Every later write names the
token, so a worker that lost its lease changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.database import Database
from db.models import GpuReservationRow, RunEventRow, RunRow, WorkerRow
from db.types import FINAL_STATES, RunState, now_ms

LEASE_MS = 30_000
WORKER_SILENCE_MS = 20_000

# A run is never queued again: repeating one is a new run, asked for by a person.
TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.QUEUED: frozenset({RunState.RUNNING, RunState.CANCELLED}),
    RunState.RUNNING: FINAL_STATES,
}


class StaleLease(Exception):  # noqa: N818 - an expected event, not an error
    """The run is no longer held under this token; nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A worker process, named so that a later process with the same pid is not mistaken for it."""

    host: str
    pid: int
    pid_start_ticks: int

    @property
    def owner(self) -> str:
        """The name kept in `lease_owner` and in events."""
        return f"{self.host}:{self.pid}:{self.pid_start_ticks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run and to finish one run."""

    run_id: str
    token: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """A running run, with what is needed to execute it or to clean up after it."""

    lease: Lease
    spec: dict[str, Any]
    cancel_requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a heartbeat learns of its own run."""

    cancel_requested: bool


def add_event(
    session: Session, run_id: str, who: str, source: RunState | None, to: RunState, why: str | None
) -> None:
    """Append one line to a run's history."""
    session.add(
        RunEventRow(run_id=run_id, at_ms=now_ms(), who=who, from_state=source, to_state=to, why=why)
    )


def _move(
    session: Session,
    run_id: str,
    source: RunState,
    to: RunState,
    *,
    who: str,
    why: str | None,
    token: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Change the state if the run is still where we think it is; say whether it was."""
    if to not in TRANSITIONS.get(source, frozenset()):
        raise ValueError(f"a run cannot go from {source} to {to}")
    changed = update(RunRow).where(RunRow.id == run_id, RunRow.state == source)
    if token is not None:
        changed = changed.where(RunRow.lease_token == token)
    changed = changed.values(state=to, why=why, **(values or {})).returning(RunRow.id)
    if session.execute(changed).first() is None:
        return False
    add_event(session, run_id, who, source, to, why)
    return True


def claim_next_run(database: Database, worker: WorkerIdentity) -> HeldRun | None:
    """Take the queued run of highest priority, oldest first; None when the queue is empty."""
    now = now_ms()
    next_id = (
        select(RunRow.id)
        .where(RunRow.state == RunState.QUEUED)
        .order_by(RunRow.priority.desc(), RunRow.created_at_ms, RunRow.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    claim = (
        update(RunRow)
        .where(RunRow.id == next_id, RunRow.state == RunState.QUEUED)
        .values(
            state=RunState.RUNNING,
            lease_owner=worker.owner,
            lease_token=RunRow.lease_token + 1,
            lease_expires_at_ms=now + LEASE_MS,
            heartbeat_at_ms=now,
            started_at_ms=now,
            host=worker.host,
        )
        .returning(RunRow.id, RunRow.lease_token, RunRow.spec)
        .execution_options(synchronize_session=False)
    )
    with database.write() as session:
        row = session.execute(claim).first()
        if row is None:
            return None
        add_event(session, row.id, worker.owner, RunState.QUEUED, RunState.RUNNING, None)
    lease = Lease(run_id=row.id, token=row.lease_token, owner=worker.owner)
    return HeldRun(lease=lease, spec=row.spec, cancel_requested=False)


def heartbeat(database: Database, lease: Lease) -> Pulse | None:
    """Extend the lease; None when it is lost and the caller must kill its own child."""
    now = now_ms()
    beat = (
        update(RunRow)
        .where(
            RunRow.id == lease.run_id,
            RunRow.lease_token == lease.token,
            RunRow.state == RunState.RUNNING,
        )
        .values(heartbeat_at_ms=now, lease_expires_at_ms=now + LEASE_MS)
        .returning(RunRow.cancel_requested_at_ms)
    )
    with database.write() as session:
        row = session.execute(beat).first()
    return None if row is None else Pulse(cancel_requested=row.cancel_requested_at_ms is not None)


def read_pulse(database: Database, lease: Lease) -> Pulse | None:
    """Look at the run without writing: None when the lease is lost."""
    held = select(RunRow.cancel_requested_at_ms).where(
        RunRow.id == lease.run_id,
        RunRow.lease_token == lease.token,
        RunRow.state == RunState.RUNNING,
    )
    with database.read() as session:
        row = session.execute(held).first()
    return None if row is None else Pulse(cancel_requested=row.cancel_requested_at_ms is not None)


def record_process(
    database: Database, lease: Lease, *, pid: int, pid_start_ticks: int, run_directory: str
) -> None:
    """Keep which process runs the run and where its files lie; raises StaleLease."""
    record = (
        update(RunRow)
        .where(RunRow.id == lease.run_id, RunRow.lease_token == lease.token)
        .where(RunRow.state == RunState.RUNNING)
        .values(pid=pid, pid_start_ticks=pid_start_ticks, run_directory=run_directory)
        .returning(RunRow.id)
    )
    with database.write() as session:
        if session.execute(record).first() is None:
            raise StaleLease(lease.run_id)


def finish(
    session: Session, lease: Lease, state: RunState, *, why: str | None, exit_code: int | None
) -> None:
    """End a held run inside the caller's transaction; raises StaleLease, which undoes it all."""
    values = {"exit_code": exit_code, "finished_at_ms": now_ms(), "lease_expires_at_ms": None}
    source = RunState.RUNNING
    moved = _move(
        session,
        lease.run_id,
        source,
        state,
        who=lease.owner,
        why=why,
        token=lease.token,
        values=values,
    )
    if not moved:
        raise StaleLease(lease.run_id)
    session.execute(delete(GpuReservationRow).where(GpuReservationRow.run_id == lease.run_id))


def finish_run(
    database: Database, lease: Lease, state: RunState, *, why: str, exit_code: int | None = None
) -> None:
    """End a held run that left no measurement; raises StaleLease."""
    with database.write() as session:
        finish(session, lease, state, why=why, exit_code=exit_code)


def cancel_run(session: Session, run_id: str, who: str) -> bool:
    """Cancel a queued run at once, or ask a running one to stop; False when it has ended."""
    values = {"finished_at_ms": now_ms(), "cancel_requested_at_ms": now_ms()}
    why = "cancelled before it started"
    source, to = RunState.QUEUED, RunState.CANCELLED
    if _move(session, run_id, source, to, who=who, why=why, values=values):
        return True
    first_request = func.coalesce(RunRow.cancel_requested_at_ms, now_ms())
    ask = (
        update(RunRow)
        .where(RunRow.id == run_id, RunRow.state == RunState.RUNNING)
        .values(cancel_requested_at_ms=first_request)
        .returning(RunRow.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(ask).first() is not None


def reserve_gpus(database: Database, lease: Lease, device_uuids: tuple[str, ...]) -> str | None:
    """Hold GPUs until the run ends; return the id of a run that holds one of them already."""
    now = now_ms()
    rows = [
        GpuReservationRow(
            device_uuid=uuid, run_id=lease.run_id, lease_token=lease.token, reserved_at_ms=now
        )
        for uuid in device_uuids
    ]
    try:
        with database.write() as session:
            session.add_all(rows)
    except IntegrityError:
        holder = select(GpuReservationRow.run_id).where(
            GpuReservationRow.device_uuid.in_(device_uuids)
        )
        with database.read() as session:
            return session.scalars(holder).first() or "another run"
    return None


def running_on(database: Database, host: str) -> list[HeldRun]:
    """List what the database believes to be running on a host."""
    rows = select(RunRow).where(RunRow.state == RunState.RUNNING, RunRow.host == host)
    with database.read() as session:
        return [
            HeldRun(
                lease=Lease(run_id=row.id, token=row.lease_token, owner=row.lease_owner or host),
                spec=row.spec,
                cancel_requested=row.cancel_requested_at_ms is not None,
            )
            for row in session.scalars(rows)
        ]


def lose_expired_elsewhere(database: Database, worker: WorkerIdentity) -> list[str]:
    """Mark as lost the runs of other hosts whose lease has expired; return their ids."""
    expired = select(RunRow.id, RunRow.lease_token).where(
        RunRow.state == RunState.RUNNING,
        RunRow.host != worker.host,
        RunRow.lease_expires_at_ms < now_ms(),
    )
    with database.read() as session:
        rows = session.execute(expired).all()
    for row in rows:
        lease = Lease(run_id=row.id, token=row.lease_token, owner=worker.owner)
        finish_run(database, lease, RunState.LOST, why="its worker on another host went silent")
    return [row.id for row in rows]


def beat_worker(database: Database, worker: WorkerIdentity, *, stopped: bool = False) -> None:
    """Keep a worker's sign of life; with `stopped`, its farewell."""
    now = now_ms()
    with database.write() as session:
        row = session.get(WorkerRow, worker.owner)
        if row is None:
            row = WorkerRow(
                id=worker.owner,
                host=worker.host,
                pid=worker.pid,
                pid_start_ticks=worker.pid_start_ticks,
                started_at_ms=now,
            )
            session.add(row)
        row.heartbeat_at_ms = now
        row.stopped_at_ms = now if stopped else None


def worker_alive(database: Database) -> bool:
    """Say whether some worker showed a sign of life within the last 20 seconds."""
    alive = select(WorkerRow.id).where(
        WorkerRow.stopped_at_ms.is_(None),
        WorkerRow.heartbeat_at_ms > now_ms() - WORKER_SILENCE_MS,
    )
    with database.read() as session:
        return session.scalars(alive).first() is not None
