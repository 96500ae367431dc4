"""Whatever is killed, cancelled, late or full: every run ends once, with a reason, and no process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from db import queue, repository
from db.database import Database
from db.engine import open_database
from db.types import RunState
from db.views import RunDetail
from planner.plan import default_plan
from runners.contract import JobResult, Outcome
from runners.outcome import Classified
from runners.process_tree import tagged
from runners.worker_run import Workplace, store

HERE = Path(__file__).parent
LIMIT_S = 60.0


class Bench:
    """A database, fake jobs to queue in it, and real workers to run them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "peakmark.db"
        self.database: Database = open_database(str(self.file), recorded=None)
        self.workers: list[subprocess.Popen[bytes]] = []

    def queue(self, mode: str, **changes: object) -> str:
        spec = {
            "schema": 1,
            "kind": "attention",
            "world": "cpu",
            "attention": {"fake": mode},
            "deadline_s": 60.0,
            **changes,
        }
        return repository.create_run(self.database, spec, idempotency_key=uuid.uuid4().hex)

    def start_worker(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.file.parent / "worker.log").open("ab")
        command = [sys.executable, str(HERE / "fake_worker.py"), str(self.file), *arguments]
        worker = subprocess.Popen(command, stdout=log, stderr=log)
        self.workers.append(worker)
        return worker

    def drain(self) -> None:
        """Run everything that is queued."""
        assert self.start_worker("--once").wait(LIMIT_S) == 0, self.log()

    def log(self) -> str:
        return (self.file.parent / "worker.log").read_text()

    def folder(self, run_id: str) -> Path:
        return self.file.parent / "runs" / run_id

    def run(self, run_id: str) -> RunDetail:
        detail = repository.get_run(self.database, run_id)
        assert detail is not None
        return detail

    def wait_ready(self, run_id: str) -> None:
        wait_for((self.folder(run_id) / "ready").exists)

    def wait_state(self, run_id: str, state: RunState) -> None:
        wait_for(lambda: self.run(run_id).summary.state is state)

    def living(self, run_id: str) -> list[int]:
        """The processes of the job that still run, as they noted themselves."""
        pids = [int(path.name) for path in (self.folder(run_id) / "pids").iterdir()]
        return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.05)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for worker in bench.workers:
        worker.kill()
        worker.wait()


def test_a_run_is_executed_and_its_result_stored(bench: Bench) -> None:
    run_id = bench.queue("done")
    bench.drain()
    run = bench.run(run_id)
    assert run.summary.state is RunState.DONE
    assert run.summary.measured_allocated_bytes == 1234
    assert run.summary.measured_step_time_s == 0.5
    assert run.measured == {"allocated_bytes": 1234, "step_time_s": 0.5, "loss": None}
    assert run.environment == {"gpu": None, "torch": "none"}
    assert run.exit_code == 0
    states = [event.to_state for event in repository.run_events(bench.database, run_id)]
    assert states == ["queued", "running", "done"]


def test_out_of_memory_is_a_result_with_the_allocators_words(bench: Bench) -> None:
    run_id = bench.queue("oom")
    bench.drain()
    run = bench.run(run_id)
    assert run.summary.state is RunState.OOM_DEVICE
    assert run.summary.why == "tried to allocate 2.00 GiB"
    assert run.error == {"type": "OutOfMemoryError", "message": "tried to allocate 2.00 GiB"}
    assert run.measured is not None


def test_jobs_that_fail_end_with_their_reason_and_hold_up_no_other(bench: Bench) -> None:
    runs = {
        mode: bench.queue(mode)
        for mode in ("truncated", "disk_full", "raise", "silent", "killed", "family_done", "done")
    }
    bench.drain()
    ends = {mode: bench.run(run_id).summary for mode, run_id in runs.items()}
    assert {mode: (end.state.value, end.why) for mode, end in ends.items()} == {
        "truncated": ("failed", "the job's result file cannot be used: it is not JSON (cut off?)"),
        "disk_full": ("failed", "the disk is full: the job could not write"),
        "raise": ("failed", "it ended with exit code 1: RuntimeError: the shapes do not match"),
        "silent": ("failed", "the job ended without leaving a result"),
        "killed": ("crashed", "it was killed by SIGKILL"),
        "family_done": ("done", None),
        "done": ("done", None),
    }
    assert bench.run(runs["killed"]).exit_code == -signal.SIGKILL
    assert bench.living(runs["family_done"]) == []


def test_a_spec_that_cannot_be_run_fails_with_its_field(bench: Bench) -> None:
    wrong = bench.queue("done", colour="red")
    late = bench.queue("done", deadline_s=-1)
    no_plan = bench.queue("done", plan={"schema": 1, "job": "train", "model": "x"})
    bench.drain()
    assert bench.run(no_plan).summary.state is RunState.FAILED
    assert "hardware is missing" in (bench.run(no_plan).summary.why or "")
    assert bench.run(wrong).summary.state is RunState.FAILED
    assert "unknown fields: colour" in (bench.run(wrong).summary.why or "")
    assert "deadline_s is -1" in (bench.run(late).summary.why or "")


def test_a_passed_deadline_ends_the_whole_tree(bench: Bench) -> None:
    run_id = bench.queue("family", deadline_s=2.0)
    bench.drain()
    assert bench.run(run_id).summary.state is RunState.TIMED_OUT
    assert len(list((bench.folder(run_id) / "pids").iterdir())) == 3
    assert bench.living(run_id) == []


def test_cancel_ends_the_whole_tree_and_the_worker_goes_on(bench: Bench) -> None:
    run_id = bench.queue("family")
    bench.start_worker()
    bench.wait_ready(run_id)
    assert len(bench.living(run_id)) == 3
    assert repository.request_cancel(bench.database, run_id, who="anna")
    assert bench.run(run_id).summary.cancelling
    bench.wait_state(run_id, RunState.CANCELLED)
    assert bench.living(run_id) == []
    after = bench.queue("done")
    bench.wait_state(after, RunState.DONE)


def test_a_killed_worker_takes_its_job_with_it_and_the_next_marks_it_lost(bench: Bench) -> None:
    run_id = bench.queue("family")
    first = bench.start_worker()
    bench.wait_ready(run_id)
    first.kill()
    # The supervisor alone ends the tree: no other worker is there yet.
    wait_for(lambda: bench.living(run_id) == [])
    assert bench.run(run_id).summary.state is RunState.RUNNING
    bench.drain()
    run = bench.run(run_id)
    assert run.summary.state is RunState.LOST
    assert run.summary.why == "the worker vanished"
    assert run.measured is None


def test_worker_and_supervisor_killed_at_once_leave_no_orphan(bench: Bench) -> None:
    run_id = bench.queue("sleep")
    first = bench.start_worker()
    bench.wait_ready(run_id)
    wait_for(lambda: bench.run(run_id).pid is not None)
    supervisor = bench.run(run_id).pid
    assert supervisor is not None
    first.kill()
    os.kill(supervisor, signal.SIGKILL)
    assert len(bench.living(run_id)) == 1
    bench.drain()
    assert bench.run(run_id).summary.state is RunState.LOST
    assert bench.living(run_id) == []


def test_a_result_left_by_a_job_whose_worker_died_is_kept(bench: Bench) -> None:
    run_id = bench.queue("done_then_sleep")
    first = bench.start_worker()
    bench.wait_ready(run_id)
    first.kill()
    wait_for(lambda: bench.living(run_id) == [])
    bench.drain()
    assert bench.run(run_id).summary.state is RunState.DONE
    assert bench.run(run_id).summary.measured_allocated_bytes == 1234


def test_a_killed_supervisor_ends_the_job_as_crashed(bench: Bench) -> None:
    run_id = bench.queue("sleep")
    bench.start_worker()
    bench.wait_ready(run_id)
    wait_for(lambda: bench.run(run_id).pid is not None)
    os.kill(bench.run(run_id).pid or 0, signal.SIGKILL)
    bench.wait_state(run_id, RunState.CRASHED)
    assert bench.run(run_id).summary.why == "its supervisor was killed"
    assert bench.living(run_id) == []


def test_a_worker_told_to_stop_ends_its_run_first(bench: Bench) -> None:
    run_id = bench.queue("sleep")
    waiting = bench.queue("done")
    worker = bench.start_worker()
    bench.wait_ready(run_id)
    assert repository.worker_alive(bench.database)
    worker.terminate()
    assert worker.wait(LIMIT_S) == 0
    assert bench.run(run_id).summary.state is RunState.LOST
    assert bench.run(run_id).summary.why == "the worker was stopped"
    assert bench.living(run_id) == []
    assert bench.run(waiting).summary.state is RunState.QUEUED
    assert not repository.worker_alive(bench.database)


def test_a_lost_lease_ends_the_job_and_writes_nothing(bench: Bench) -> None:
    run_id = bench.queue("sleep")
    bench.start_worker()
    bench.wait_ready(run_id)
    with sqlite3.connect(bench.file, timeout=10) as connection:
        connection.execute("UPDATE run SET lease_token = lease_token + 1")
    wait_for(lambda: bench.living(run_id) == [])
    after = bench.queue("done")
    bench.wait_state(after, RunState.DONE)
    assert bench.run(run_id).summary.state is RunState.RUNNING
    assert bench.run(run_id).measured is None


def test_a_database_locked_for_seconds_loses_nothing(bench: Bench) -> None:
    run_id = bench.queue("done")
    holder = sqlite3.connect(bench.file, timeout=10, isolation_level=None)
    bench.start_worker()
    wait_for(lambda: (bench.folder(run_id) / "launch.json").exists())
    holder.execute("BEGIN IMMEDIATE")
    wait_for((bench.folder(run_id) / "supervisor.json").exists)
    time.sleep(2.0)
    assert bench.run(run_id).summary.state is RunState.RUNNING
    holder.execute("COMMIT")
    bench.wait_state(run_id, RunState.DONE)
    assert bench.run(run_id).summary.measured_allocated_bytes == 1234


def test_a_result_waits_for_a_full_disk_to_have_room(tmp_path: Path) -> None:
    database = open_database(str(tmp_path / "peakmark.db"), recorded=None)
    spec = {"schema": 1, "kind": "attention", "world": "cpu", "attention": {"x": "y" * 5000}}
    run_id = repository.create_run(database, spec, idempotency_key="a")
    identity = queue.WorkerIdentity(host="h", pid=1, pid_start_ticks=1)
    held = queue.claim_next_run(database, identity)
    assert held is not None
    looks = []

    def allow_pages(count: int) -> None:
        with database.write() as session:
            session.connection().exec_driver_sql(f"PRAGMA max_page_count = {count}")

    def stopping() -> bool:
        """Asked between two attempts to store: the moment at which someone makes room."""
        looks.append(repository.list_runs(database)[0].state)
        allow_pages(10_000)
        return False

    allow_pages(1)
    place = Workplace(
        database=database,
        identity=identity,
        command=lambda spec, folder: [],
        stopping=stopping,
        poll_s=1.0,
        grace_s=1.0,
    )
    result = JobResult(outcome=Outcome.DONE, measured={"note": "z" * 50_000})
    store(place, held.lease, Classified(outcome=Outcome.DONE, why=None, result=result))
    assert looks == [RunState.RUNNING]
    run = repository.get_run(database, run_id)
    assert run is not None
    assert (run.summary.state, run.measured) == (RunState.DONE, {"note": "z" * 50_000})


def test_only_one_worker_serves_a_database_on_a_host(bench: Bench) -> None:
    bench.start_worker()
    wait_for(lambda: repository.worker_alive(bench.database))
    second = bench.start_worker("--once")
    assert second.wait(LIMIT_S) == 1
    assert "Another worker already serves the database" in bench.log()


def test_the_job_sees_only_what_is_allowed_of_the_environment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/cache")
    run_id = bench.queue("sleep")
    bench.start_worker()
    bench.wait_ready(run_id)
    seen = psutil.Process(bench.living(run_id)[0]).environ()
    assert "SECRET_TOKEN" not in seen
    assert seen["TRITON_CACHE_DIR"] == "/tmp/cache"
    assert seen["PEAKMARK_RUN_ID"] == run_id
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""


def test_the_run_folder_holds_spec_and_ending(bench: Bench) -> None:
    run_id = bench.queue("done")
    bench.drain()
    folder = bench.folder(run_id)
    assert bench.run(run_id).run_directory == str(folder)
    assert json.loads((folder / "spec.json").read_text())["attention"] == {"fake": "done"}
    ending = json.loads((folder / "supervisor.json").read_text())
    assert ending == {"schema": 1, "exit_code": 0, "stopped_by": None, "oom_kills": 0}


@pytest.mark.slow
def test_cancel_ends_the_ranks_that_torchrun_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {
        **default_plan().to_dict(),
        "model": {
            "name": "tiny",
            "config": {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
            },
        },
        "parallelism": {"engine": "peakmark", "zero_stage": 1, "world_size": 2},
    }
    plan["workload"] |= {"sequence_length": 32, "attention": "sdpa", "precision": "fp32"}
    spec = {"schema": 1, "kind": "train_step", "world": "cpu", "plan": plan, "steps": 10_000_000}
    run_id = repository.create_run(bench.database, spec, idempotency_key="a")
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", f"sqlite:///{bench.file}")
    bench.workers.append(subprocess.Popen([sys.executable, "-m", "runners.worker"]))
    events = [bench.folder(run_id) / f"events-rank{rank}.jsonl" for rank in range(2)]
    wait_for(lambda: all(file.exists() and "phase" in file.read_text() for file in events))
    # The supervisor, torchrun's agent, and two ranks in sessions of their own.
    assert len(tagged(run_id)) >= 4
    assert repository.request_cancel(bench.database, run_id)
    bench.wait_state(run_id, RunState.CANCELLED)
    assert tagged(run_id) == set()
