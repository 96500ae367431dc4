"""What pages, commands and the worker ask of the database, in short sessions and plain data."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, joinedload

from db import queue
from db.database import Database
from db.measurements import content_hash, measurements, store_result
from db.models import MeasurementRow, PlanRow, PredictionRow, RunEventRow, RunRow
from db.queue import worker_alive
from db.types import RunKind, RunState, RunWorld, VerdictState, now_ms
from db.views import RunDetail, RunEvent, RunSummary

__all__ = [
    "create_run",
    "get_run",
    "list_runs",
    "measurements",
    "request_cancel",
    "rerun",
    "run_events",
    "store_result",
    "worker_alive",
]


def create_run(
    database: Database,
    spec: Mapping[str, Any],
    plan: Mapping[str, Any] | None = None,
    prediction: Mapping[str, Any] | None = None,
    *,
    idempotency_key: str,
    who: str = "person",
    priority: int = 0,
) -> str:
    """Queue a run and return its id; a key seen before returns the run that it made then.

    `spec` is a job spec's dictionary, `prediction` is kept as the snapshot to compare with.
    Raises ValueError when the spec names a kind or a world that does not exist.
    """
    kind, world = RunKind(spec["kind"]), RunWorld(spec["world"])

    def build(session: Session) -> RunRow:
        plan_id = None if plan is None else _keep_plan(session, plan)
        return RunRow(
            kind=kind,
            world=world,
            spec=dict(spec),
            plan_id=plan_id,
            prediction_id=prediction and _keep_prediction(session, prediction, plan_id),
            priority=priority,
            attempt=1,
        )

    return _queue_once(database, idempotency_key, who, build)


def rerun(database: Database, run_id: str, *, idempotency_key: str, who: str = "person") -> str:
    """Queue the same spec again as a new run with the same prediction; return the new id.

    Raises KeyError when there is no run `run_id`.
    """

    def build(session: Session) -> RunRow:
        first = session.get(RunRow, run_id)
        if first is None:
            raise KeyError(run_id)
        return RunRow(
            kind=first.kind,
            world=first.world,
            spec=first.spec,
            plan_id=first.plan_id,
            prediction_id=first.prediction_id,
            rerun_of_id=first.id,
            priority=first.priority,
            attempt=first.attempt + 1,
        )

    return _queue_once(database, idempotency_key, who, build)


def _queue_once(database: Database, key: str, who: str, build: Callable[[Session], RunRow]) -> str:
    by_key = select(RunRow.id).where(RunRow.idempotency_key == key)
    try:
        with database.write() as session:
            known = session.scalars(by_key).first()
            if known is not None:
                return known
            run = build(session)
            run.id, run.idempotency_key = secrets.token_hex(8), key
            run.state, run.lease_token, run.created_at_ms = RunState.QUEUED, 0, now_ms()
            session.add(run)
            session.flush()
            queue.add_event(session, run.id, who, None, RunState.QUEUED, None)
            return run.id
    except IntegrityError:
        # Where writers do not exclude one another, the other one with this key was faster.
        with database.read() as session:
            known = session.scalars(by_key).first()
        if known is None:
            raise
        return known


def _keep_plan(session: Session, plan: Mapping[str, Any]) -> int:
    digest = content_hash(plan)
    known = session.scalars(select(PlanRow.id).where(PlanRow.hash == digest)).first()
    if known is not None:
        return known
    model, hardware = plan["model"], plan["hardware"]
    row = PlanRow(
        hash=digest,
        document=dict(plan),
        job=plan["job"],
        model_name=str(model.get("name") or model.get("preset") or "custom model"),
        hardware_name=str(hardware.get("preset") or hardware.get("custom", {}).get("name")),
        created_at_ms=now_ms(),
    )
    session.add(row)
    session.flush()
    return row.id


def _keep_prediction(session: Session, prediction: Mapping[str, Any], plan_id: int | None) -> int:
    digest = content_hash(prediction)
    same = select(PredictionRow.id).where(PredictionRow.hash == digest)
    known = session.scalars(same).first()
    if known is not None:
        return known
    memory = prediction.get("memory") or {}
    throughput = prediction.get("throughput") or {}
    verdict = (prediction.get("verdict") or {}).get("state")
    row = PredictionRow(
        plan_id=plan_id,
        hash=digest,
        document=dict(prediction),
        planner_version=prediction.get("planner_version"),
        allocated_bytes=memory.get("allocated_bytes"),
        reserved_bytes=memory.get("reserved_bytes"),
        device_bytes=memory.get("device_bytes"),
        step_time_s=throughput.get("step_time_s"),
        tokens_per_s=throughput.get("tokens_per_s"),
        verdict=None if verdict is None else VerdictState(verdict),
        created_at_ms=now_ms(),
    )
    session.add(row)
    session.flush()
    return row.id


def request_cancel(database: Database, run_id: str, *, who: str = "person") -> bool:
    """Cancel a queued run, or ask the worker to stop a running one; False when it has ended."""
    with database.write() as session:
        return queue.cancel_run(session, run_id, who)


_SUMMARY = (
    select(
        RunRow.id,
        RunRow.kind,
        RunRow.world,
        RunRow.state,
        RunRow.cancel_requested_at_ms.is_not(None).label("cancelling"),
        RunRow.priority,
        RunRow.attempt,
        PlanRow.model_name,
        PlanRow.hardware_name,
        PredictionRow.verdict,
        PredictionRow.allocated_bytes.label("predicted_allocated_bytes"),
        PredictionRow.device_bytes.label("predicted_device_bytes"),
        PredictionRow.step_time_s.label("predicted_step_time_s"),
        PredictionRow.tokens_per_s.label("predicted_tokens_per_s"),
        MeasurementRow.allocated_bytes.label("measured_allocated_bytes"),
        MeasurementRow.device_bytes.label("measured_device_bytes"),
        MeasurementRow.step_time_s.label("measured_step_time_s"),
        MeasurementRow.tokens_per_s.label("measured_tokens_per_s"),
        RunRow.why,
        RunRow.created_at_ms,
        RunRow.started_at_ms,
        RunRow.finished_at_ms,
    )
    .outerjoin(PlanRow, RunRow.plan_id == PlanRow.id)
    .outerjoin(PredictionRow, RunRow.prediction_id == PredictionRow.id)
    .outerjoin(MeasurementRow, MeasurementRow.run_id == RunRow.id)
)


def list_runs(
    database: Database,
    *,
    states: Sequence[RunState] = (),
    kinds: Sequence[RunKind] = (),
    limit: int = 200,
    offset: int = 0,
) -> list[RunSummary]:
    """List runs, newest first; an empty filter lets everything through."""
    query = _SUMMARY.order_by(RunRow.created_at_ms.desc(), RunRow.id).limit(limit).offset(offset)
    if states:
        query = query.where(RunRow.state.in_(states))
    if kinds:
        query = query.where(RunRow.kind.in_(kinds))
    with database.read() as session:
        return [_summary(row._mapping) for row in session.execute(query)]


def _summary(columns: Mapping[Any, Any]) -> RunSummary:
    fields = dict(columns)
    # The request stays in the row for ever; the run is "cancelling" only until it ends.
    fields["cancelling"] = bool(fields["cancelling"]) and fields["state"] is RunState.RUNNING
    return RunSummary(**fields)


def get_run(database: Database, run_id: str) -> RunDetail | None:
    """Return everything known of a run; None when there is no such run."""
    with database.read() as session:
        line = session.execute(_SUMMARY.where(RunRow.id == run_id)).first()
        run = session.get(
            RunRow,
            run_id,
            options=[
                joinedload(RunRow.plan),
                joinedload(RunRow.prediction),
                joinedload(RunRow.measurement).joinedload(MeasurementRow.environment),
            ],
        )
        if line is None or run is None:
            return None
        seen = run.measurement
        return RunDetail(
            summary=_summary(line._mapping),
            spec=run.spec,
            plan=run.plan.document if run.plan else None,
            prediction=run.prediction.document if run.prediction else None,
            measured=seen.measured if seen else None,
            error=seen.error if seen else None,
            environment=seen.environment.document if seen else None,
            rerun_of_id=run.rerun_of_id,
            host=run.host,
            pid=run.pid,
            exit_code=run.exit_code,
            run_directory=run.run_directory,
            lease_token=run.lease_token,
            heartbeat_at_ms=run.heartbeat_at_ms,
        )


def run_events(database: Database, run_id: str) -> list[RunEvent]:
    """Return the history of a run, oldest first."""
    query = select(RunEventRow).where(RunEventRow.run_id == run_id).order_by(RunEventRow.id)
    with database.read() as session:
        return [
            RunEvent(
                at_ms=row.at_ms,
                who=row.who,
                from_state=row.from_state,
                to_state=row.to_state,
                why=row.why,
            )
            for row in session.scalars(query)
        ]
