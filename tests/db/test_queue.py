from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import update

from db import queue
from db.database import Database
from db.measurements import StoredResult, measurements, store_result
from db.models import RunRow
from db.queue import HeldRun, Lease, StaleLease, WorkerIdentity
from db.repository import create_run, get_run, list_runs, request_cancel, run_events
from db.types import FINAL_STATES, RunState, now_ms

SPEC = {"schema": 1, "kind": "train_step", "world": "cpu"}
ANNA = WorkerIdentity(host="anna", pid=10, pid_start_ticks=100)
BERT = WorkerIdentity(host="bert", pid=20, pid_start_ticks=200)
RESULT = StoredResult(
    state=RunState.DONE, measured={"allocated_bytes": 7}, environment={"torch": "x"}
)

CLAIM_ALL = """
import os, sys
from db import queue
from db.database import Database, connect, resolve_url
place = resolve_url(sys.argv[1])
database = Database(engine=connect(place), url=place)
worker = queue.WorkerIdentity(host="h", pid=os.getpid(), pid_start_ticks=1)
print("ready", flush=True)
sys.stdin.read()
while (held := queue.claim_next_run(database, worker)) is not None:
    print(held.lease.run_id, flush=True)
"""

SUBMIT = """
import sys
from db.database import Database, connect, resolve_url
from db.repository import create_run
place = resolve_url(sys.argv[1])
database = Database(engine=connect(place), url=place)
print("ready", flush=True)
sys.stdin.read()
spec = {"schema": 1, "kind": "train_step", "world": "cpu"}
print(*{create_run(database, spec, idempotency_key="pressed twice") for _ in range(20)})
"""


def claim(database: Database, worker: WorkerIdentity = ANNA) -> HeldRun:
    held = queue.claim_next_run(database, worker)
    assert held is not None
    return held


def state_of(database: Database, run_id: str) -> RunState:
    run = get_run(database, run_id)
    assert run is not None
    return run.summary.state


def run_together(script: str, file: Path, count: int) -> list[str]:
    """Start processes, let them all go at once, and return what each printed."""
    command = [sys.executable, "-c", script, str(file)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return outputs


def test_six_processes_claim_sixty_runs_each_exactly_once(database: Database, file: Path) -> None:
    runs = {create_run(database, SPEC, idempotency_key=str(i)) for i in range(60)}
    outputs = run_together(CLAIM_ALL, file, 6)
    claimed = [run_id for output in outputs for run_id in output.split()]
    assert len(claimed) == 60
    assert set(claimed) == runs
    # Otherwise one process did it all and nothing was put to the test.
    assert sum(bool(output) for output in outputs) > 1


def test_one_key_makes_one_run_also_from_three_processes(database: Database, file: Path) -> None:
    outputs = run_together(SUBMIT, file, 3)
    assert len({output.strip() for output in outputs}) == 1
    assert len(list_runs(database)) == 1


def test_the_highest_priority_goes_first_then_the_oldest(database: Database) -> None:
    ids = [
        create_run(database, SPEC, idempotency_key=str(i), priority=priority)
        for i, priority in enumerate((0, 5, 0))
    ]
    with database.write() as session:
        for age, run_id in enumerate(ids):
            session.execute(update(RunRow).where(RunRow.id == run_id).values(created_at_ms=age))
    order = [claim(database).lease.run_id for _ in ids]
    assert order == [ids[1], ids[0], ids[2]]
    assert queue.claim_next_run(database, ANNA) is None


def test_a_stale_token_writes_nothing(database: Database) -> None:
    create_run(database, SPEC, idempotency_key="a")
    held = claim(database)
    assert held.lease.token == 1
    stale = Lease(run_id=held.lease.run_id, token=0, owner="someone")
    assert queue.heartbeat(database, stale) is None
    assert queue.read_pulse(database, stale) is None
    with pytest.raises(StaleLease):
        store_result(database, stale, RESULT)
    with pytest.raises(StaleLease):
        queue.record_process(database, stale, pid=1, pid_start_ticks=1, run_directory="x")
    assert state_of(database, stale.run_id) is RunState.RUNNING
    assert measurements(database) == []
    store_result(database, held.lease, RESULT)
    assert state_of(database, stale.run_id) is RunState.DONE


def test_a_finished_run_is_never_finished_again(database: Database) -> None:
    create_run(database, SPEC, idempotency_key="a")
    lease = claim(database).lease
    queue.finish_run(database, lease, RunState.FAILED, why="first")
    with pytest.raises(StaleLease):
        store_result(database, lease, RESULT)
    assert state_of(database, lease.run_id) is RunState.FAILED
    assert measurements(database) == []


def test_a_heartbeat_extends_the_lease_and_brings_the_request(database: Database) -> None:
    run_id = create_run(database, SPEC, idempotency_key="a")
    lease = claim(database).lease
    with database.write() as session:
        session.execute(update(RunRow).values(lease_expires_at_ms=1))
    before = now_ms()
    assert queue.heartbeat(database, lease) == queue.Pulse(cancel_requested=False)
    with database.read() as session:
        row = session.get_one(RunRow, run_id)
        assert row.lease_expires_at_ms is not None
        assert before + 30_000 <= row.lease_expires_at_ms <= now_ms() + 30_000
    assert request_cancel(database, run_id)
    assert queue.heartbeat(database, lease) == queue.Pulse(cancel_requested=True)


def test_cancel_is_immediate_when_queued_and_refused_when_ended(database: Database) -> None:
    run_id = create_run(database, SPEC, idempotency_key="a")
    assert request_cancel(database, run_id, who="carl")
    assert state_of(database, run_id) is RunState.CANCELLED
    assert queue.claim_next_run(database, ANNA) is None
    assert not request_cancel(database, run_id)
    assert not request_cancel(database, "no such run")
    last = run_events(database, run_id)[-1]
    assert (last.who, last.from_state, last.to_state) == ("carl", "queued", "cancelled")


def test_only_silent_runs_of_other_hosts_are_lost(database: Database) -> None:
    for key in "abc":
        create_run(database, SPEC, idempotency_key=key)
    mine, silent, lively = claim(database, ANNA), claim(database, BERT), claim(database, BERT)
    with database.write() as session:
        old = RunRow.id.in_([mine.lease.run_id, silent.lease.run_id])
        session.execute(update(RunRow).where(old).values(lease_expires_at_ms=1))
    assert queue.lose_expired_elsewhere(database, ANNA) == [silent.lease.run_id]
    assert state_of(database, silent.lease.run_id) is RunState.LOST
    assert state_of(database, mine.lease.run_id) is RunState.RUNNING
    assert queue.heartbeat(database, lively.lease) is not None
    assert [held.lease for held in queue.running_on(database, "anna")] == [mine.lease]


def test_a_gpu_is_held_by_one_run_until_it_ends(database: Database) -> None:
    for key in "ab":
        create_run(database, SPEC, idempotency_key=key)
    first, second = claim(database).lease, claim(database).lease
    assert queue.reserve_gpus(database, first, ("GPU-1", "GPU-2")) is None
    assert queue.reserve_gpus(database, second, ("GPU-3", "GPU-2")) == first.run_id
    queue.finish_run(database, first, RunState.FAILED, why="x")
    assert queue.reserve_gpus(database, second, ("GPU-3", "GPU-2")) is None


def test_transitions_lead_from_queued_over_running_to_an_end() -> None:
    assert set(queue.TRANSITIONS) == {RunState.QUEUED, RunState.RUNNING}
    assert queue.TRANSITIONS[RunState.RUNNING] == FINAL_STATES
    assert len(FINAL_STATES) == 8


def test_a_move_outside_the_table_is_refused(database: Database) -> None:
    create_run(database, SPEC, idempotency_key="a")
    lease = claim(database).lease
    with pytest.raises(ValueError, match="cannot go from running to queued"):
        queue.finish_run(database, lease, RunState.QUEUED, why="again")


def test_a_worker_is_alive_until_it_stops_or_falls_silent(database: Database) -> None:
    assert not queue.worker_alive(database)
    queue.beat_worker(database, ANNA)
    assert queue.worker_alive(database)
    queue.beat_worker(database, ANNA, stopped=True)
    assert not queue.worker_alive(database)
    queue.beat_worker(database, BERT)
    with database.write() as session:
        session.connection().exec_driver_sql(
            "UPDATE worker SET heartbeat_at_ms = heartbeat_at_ms - 21000"
        )
    assert not queue.worker_alive(database)
