"""Experiments keep what was put into them, and refuse bad input without losing anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from db import queue
from db.database import Database
from db.experiments import (
    Experiment,
    add_members,
    create_experiment,
    delete_experiment,
    experiment_members,
    list_experiments,
    remove_members,
    rename_experiment,
)
from db.measurements import StoredResult, measurements, store_result
from db.models import MeasurementRow
from db.queue import WorkerIdentity
from db.recorded import load_files
from db.repository import create_run
from db.types import RunState
from planner.errors import PlanError
from planner.records import row_id

SPEC: dict[str, Any] = {"schema": 1, "kind": "train_step", "world": "cpu", "plan": {"x": 1}}


def finished(database: Database, key: str, **measured: Any) -> str:
    run_id = create_run(database, SPEC, idempotency_key=key)
    held = queue.claim_next_run(database, WorkerIdentity(host="h", pid=1, pid_start_ticks=1))
    assert held is not None
    result = StoredResult(state=RunState.DONE, measured=measured, environment={"gpu": None})
    store_result(database, held.lease, result)
    return run_id


def recorded(database: Database, folder: Path, **measured: Any) -> str:
    environment = {"gpu": {"name": "H200"}}
    found = row_id(SPEC, measured, environment)
    line = {
        "schema": 1, "id": found, "kind": "train_step", "recorded_at": "2026-01-01T00:00:00Z",
        "role": "evidence", "spec": SPEC, "outcome": "done", "measured": measured,
        "environment": environment,
    }  # fmt: skip
    (folder / "rows.jsonl").write_text(json.dumps(line))
    assert load_files(database, [folder / "rows.jsonl"]).problems == ()
    return found


def test_runs_and_recorded_rows_are_members_once(database: Database, tmp_path: Path) -> None:
    one = create_experiment(database, "  Stages  ")
    run_id = finished(database, "a", allocated_bytes=1)
    waiting = create_run(database, SPEC, idempotency_key="b")
    row = recorded(database, tmp_path, allocated_bytes=2)
    assert add_members(database, one, [run_id, waiting, run_id], [row]) == 3
    assert add_members(database, one, [waiting], [row]) == 0
    assert list_experiments(database) == [Experiment(id=one, name="Stages", members=3)]
    members = experiment_members(database, one)
    assert [(m.run_id, m.row_id, m.state) for m in members] == [
        (run_id, None, "done"),
        (waiting, None, "queued"),
        (None, row, "done"),
    ]
    seen = [m.measurement and m.measurement.measured for m in members]
    assert seen == [{"allocated_bytes": 1}, None, {"allocated_bytes": 2}]
    assert remove_members(database, one, [members[0].id, 999]) == 1
    assert [m.run_id for m in experiment_members(database, one)] == [waiting, None]


def test_names_are_unique_and_bad_ones_change_nothing(database: Database) -> None:
    one, two = create_experiment(database, "Stages"), create_experiment(database, "Kernels")
    for name in ("", "   ", "x" * 81, 7, None):
        with pytest.raises(PlanError, match=r"experiment\.name"):
            create_experiment(database, name)
        with pytest.raises(PlanError, match=r"experiment\.name"):
            rename_experiment(database, one, name)
    for name in ("stages", "STAGES "):
        with pytest.raises(PlanError, match="is called 'Stages' already"):
            rename_experiment(database, two, name)
    rename_experiment(database, one, "STAGES")
    assert [found.name for found in list_experiments(database)] == ["Kernels", "STAGES"]
    with pytest.raises(PlanError, match="There is no experiment 99"):
        rename_experiment(database, 99, "x")


def test_an_unknown_run_adds_none_of_the_others(database: Database) -> None:
    one = create_experiment(database, "Stages")
    run_id = finished(database, "a", allocated_bytes=1)
    for runs, rows, what in (([run_id, "no"], [], "run no"), ([run_id], ["no"], "measurement no")):
        with pytest.raises(PlanError, match=f"There is no {what} in this database"):
            add_members(database, one, runs, rows)
    assert experiment_members(database, one) == []
    with pytest.raises(PlanError, match="There is no experiment 99"):
        add_members(database, 99, [run_id])


def test_a_withdrawn_measurement_leaves_its_place(database: Database, tmp_path: Path) -> None:
    one = create_experiment(database, "Stages")
    row = recorded(database, tmp_path, allocated_bytes=2)
    add_members(database, one, row_ids=[row])
    with database.write() as session:
        session.execute(delete(MeasurementRow))
    [member] = experiment_members(database, one)
    assert (member.row_id, member.state, member.spec, member.measurement) == (row, None, None, None)


def test_an_experiment_that_is_forgotten_leaves_its_runs(database: Database) -> None:
    one = create_experiment(database, "Stages")
    add_members(database, one, [finished(database, "a", allocated_bytes=1)])
    delete_experiment(database, one)
    assert list_experiments(database) == []
    assert len(measurements(database)) == 1
    with pytest.raises(PlanError, match="There is no experiment"):
        experiment_members(database, one)
