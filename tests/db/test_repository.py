from __future__ import annotations

import json
from typing import Any

import pytest

from db import queue
from db.database import Database
from db.measurements import StoredResult, content_hash, measurements, store_result
from db.queue import WorkerIdentity
from db.repository import create_run, get_run, list_runs, request_cancel, rerun, run_events
from db.types import Origin, RunKind, RunState, VerdictState
from planner.plan import default_plan, plan_hash
from planner.records import parse_row

SPEC: dict[str, Any] = {"schema": 1, "kind": "train_step", "world": "cpu", "plan": {"x": 1}}
PREDICTION: dict[str, Any] = {
    "schema": 1,
    "planner_version": "0.1.0",
    "memory": {"allocated_bytes": 10, "reserved_bytes": 20, "device_bytes": 30},
    "verdict": {"state": "tight"},
    "throughput": {"step_time_s": 0.25, "tokens_per_s": 4096.0},
}
WORKER = WorkerIdentity(host="h", pid=1, pid_start_ticks=1)


def execute(database: Database, **measured: Any) -> str:
    held = queue.claim_next_run(database, WORKER)
    assert held is not None
    environment = {"torch": "2", "gpu": {"name": "H200"}}
    result = StoredResult(state=RunState.DONE, measured=measured, environment=environment)
    store_result(database, held.lease, result)
    return held.lease.run_id


def test_a_run_keeps_its_plan_and_the_prediction_of_that_moment(database: Database) -> None:
    plan = default_plan().to_dict()
    run_id = create_run(database, SPEC, plan, PREDICTION, idempotency_key="a")
    run = get_run(database, run_id)
    assert run is not None
    assert (run.spec, run.plan, run.prediction) == (SPEC, plan, PREDICTION)
    assert run.summary.model_name == "meta-llama/Llama-3.1-8B"
    assert run.summary.verdict is VerdictState.TIGHT
    assert run.summary.predicted_allocated_bytes == 10
    assert run.summary.predicted_device_bytes == 30
    assert run.summary.predicted_tokens_per_s == 4096.0
    assert run.summary.outcome is None
    json.dumps(run.to_dict())


def test_a_plan_is_kept_under_the_planners_own_hash() -> None:
    assert content_hash(default_plan().to_dict()) == plan_hash(default_plan())


def test_a_kind_or_world_that_does_not_exist_is_refused(database: Database) -> None:
    with pytest.raises(ValueError, match="moon"):
        create_run(database, {**SPEC, "world": "moon"}, idempotency_key="a")
    assert list_runs(database) == []


def test_the_same_key_returns_the_first_run(database: Database) -> None:
    first = create_run(database, SPEC, idempotency_key="a")
    assert create_run(database, {**SPEC, "world": "solo"}, idempotency_key="a") == first
    assert len(list_runs(database)) == 1
    assert len(run_events(database, first)) == 1


def test_predicted_and_measured_stand_in_one_line(database: Database) -> None:
    run_id = create_run(database, SPEC, default_plan().to_dict(), PREDICTION, idempotency_key="a")
    execute(database, allocated_bytes=11, device_bytes=29, step_time_s=0.5, tokens_per_s=2048.0)
    [line] = list_runs(database)
    assert line.id == run_id
    assert (line.predicted_allocated_bytes, line.measured_allocated_bytes) == (10, 11)
    assert (line.predicted_step_time_s, line.measured_step_time_s) == (0.25, 0.5)
    assert line.finished
    assert line.outcome is RunState.DONE


def test_runs_are_filtered_by_state_and_kind(database: Database) -> None:
    first = create_run(database, SPEC, idempotency_key="a")
    second = create_run(database, {**SPEC, "kind": "attention"}, idempotency_key="b")
    request_cancel(database, first)
    assert [run.id for run in list_runs(database, states=[RunState.CANCELLED])] == [first]
    assert [run.id for run in list_runs(database, kinds=[RunKind.ATTENTION])] == [second]
    assert len(list_runs(database, limit=1)) == 1
    assert list_runs(database, offset=2) == []


def test_a_rerun_is_a_new_run_of_the_same_spec_and_prediction(database: Database) -> None:
    first = create_run(database, SPEC, default_plan().to_dict(), PREDICTION, idempotency_key="a")
    execute(database, allocated_bytes=11)
    second = rerun(database, first, idempotency_key="b")
    assert rerun(database, first, idempotency_key="b") == second
    run = get_run(database, second)
    assert run is not None
    assert run.rerun_of_id == first
    assert (run.spec, run.prediction, run.measured) == (SPEC, PREDICTION, None)
    assert (run.summary.state, run.summary.attempt) == (RunState.QUEUED, 2)
    with pytest.raises(KeyError):
        rerun(database, "no such run", idempotency_key="c")


def test_two_runs_that_saw_the_very_same_keep_a_measurement_each(database: Database) -> None:
    for key in "ab":
        create_run(database, SPEC, idempotency_key=key)
    ids = {execute(database, allocated_bytes=11) for _ in range(2)}
    seen = measurements(database)
    assert {row.run_id for row in seen} == ids
    assert {row.origin for row in seen} == {Origin.HERE}


def test_a_measurement_made_here_is_a_valid_recorded_row(database: Database) -> None:
    create_run(database, SPEC, idempotency_key="a")
    execute(database, allocated_bytes=11)
    [seen] = measurements(database)
    row = parse_row(json.loads(json.dumps(seen.to_row())))
    assert row.measured == {"allocated_bytes": 11}
    assert row.environment["gpu"] == {"name": "H200"}


def test_a_figure_no_column_can_hold_stays_in_the_document(database: Database) -> None:
    run_id = create_run(database, SPEC, idempotency_key="a")
    execute(database, allocated_bytes=2**70, device_bytes="many", step_time_s=True)
    run = get_run(database, run_id)
    assert run is not None
    assert run.measured == {"allocated_bytes": 2**70, "device_bytes": "many", "step_time_s": True}
    assert run.summary.measured_allocated_bytes is None
    assert run.summary.measured_device_bytes is None


def test_an_unknown_run_is_none(database: Database) -> None:
    assert get_run(database, "nothing") is None
    assert run_events(database, "nothing") == []
