"""Runs from the command line: proving, watching, cancelling, carrying to another database."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.commands import prove
from db import queue
from db.engine import open_database
from db.measurements import StoredResult, store_result
from db.queue import WorkerIdentity
from db.repository import create_run, get_run, list_runs
from db.types import RunState

Run = Callable[..., tuple[int, str, str]]
WORKER = WorkerIdentity(host="here", pid=1, pid_start_ticks=1)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
STATE = {"parameter_bytes": 100, "gradient_bytes": 100, "optimizer_bytes": 100}


@pytest.fixture(autouse=True)
def config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[str, ...]:
    return ("--config", str(tmp_path / "config.json"), "--gpus", "1", "--seq", "32")


class FakeWorker:
    """Stands in for the worker process: ends the queued run as the test wants, or dies."""

    result: StoredResult | None = None
    started = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        assert command[1:] == ["-m", "runners.worker", "--once"]
        FakeWorker.started += 1
        self.returncode = 0 if self.result else 3
        if self.result is not None:
            database = open_database()
            held = queue.claim_next_run(database, WORKER)
            assert held is not None
            store_result(database, held.lease, self.result)
            database.close()

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float) -> int:
        return self.returncode


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(prove.subprocess, "Popen", FakeWorker)
    monkeypatch.setattr(prove, "POLL_S", 0.01)
    monkeypatch.setattr(FakeWorker, "started", 0)
    return FakeWorker


def ended(state: RunState, **fields: Any) -> StoredResult:
    return StoredResult(state=state, measured=fields.pop("measured", {}), environment={}, **fields)


def test_prove_starts_a_worker_and_compares_what_it_measured(
    run: Run, tiny: tuple[str, ...], worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "result", ended(RunState.DONE, measured={"state": STATE}))
    code, out, _ = run("prove", *tiny, "--world", "cpu", "--json")
    answer = json.loads(out)
    assert (code, worker.started) == (0, 1)
    assert answer["summary"]["state"] == "done"
    assert answer["spec"]["world"] == "cpu"
    assert answer["spec"]["plan"]["workload"]["sequence_length"] == 32
    rows = {row["quantity"]: row for row in answer["comparison"]}
    predicted = rows["parameters state"]["predicted"]
    # Embedding and head 128x64 each, final norm, two layers; stage 3 of `mixed` keeps fp32 only.
    per_layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64
    assert predicted == 4 * (2 * 128 * 64 + 64 + 2 * per_layer)
    assert rows["parameters state"]["error_percent"] == pytest.approx(predicted - 100)


@pytest.mark.parametrize(
    ("state", "exit_code"),
    [
        (RunState.DONE, 0),
        (RunState.OOM_DEVICE, 0),
        (RunState.OOM_HOST, 1),
        (RunState.FAILED, 1),
        (RunState.CRASHED, 1),
        (RunState.TIMED_OUT, 1),
    ],
)
def test_only_a_result_is_success(
    run: Run,
    tiny: tuple[str, ...],
    worker: type[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
    state: RunState,
    exit_code: int,
) -> None:
    monkeypatch.setattr(worker, "result", ended(state, why="because"))
    code, out, _ = run("prove", *tiny)
    assert code == exit_code
    assert state.value in out
    assert "because" in out


def test_a_worker_that_dies_leaves_no_run_behind_in_the_queue(
    run: Run, tiny: tuple[str, ...], worker: type[FakeWorker]
) -> None:
    code, _, err = run("prove", *tiny)
    assert code == 2
    assert "exit code 3" in err
    assert worker.started == prove.MAX_WORKER_STARTS
    assert [r.state for r in list_runs(open_database())] == [RunState.CANCELLED]


def test_ctrl_c_cancels_the_run(
    run: Run, tiny: tuple[str, ...], worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_ctrl_c(_: float) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(prove.time, "sleep", press_ctrl_c)
    monkeypatch.setattr(worker, "poll", lambda _: None)
    code, out, _ = run("prove", *tiny, "--json")
    assert code == 1
    assert json.loads(out)["summary"]["state"] == "cancelled"


def test_progress_shows_the_last_phase_of_the_job(run: Run, tmp_path: Path) -> None:
    database = open_database(str(tmp_path / "peakmark.db"))
    spec = {"schema": 1, "kind": "train_step", "world": "cpu", "plan": {}}
    run_id = create_run(database, spec, idempotency_key="a")
    held = queue.claim_next_run(database, WORKER)
    assert held is not None
    queue.record_process(
        database, held.lease, pid=1, pid_start_ticks=1, run_directory=str(tmp_path)
    )
    detail = get_run(database, run_id)
    assert detail is not None
    assert prove.progress_line(detail) == f"run {run_id}: running"
    events = tmp_path / "events-rank0.jsonl"
    events.write_text('{"event": "start"}\n{"event": "phase", "name": "warmup"}\n')
    assert prove.progress_line(detail) == f"run {run_id}: running, warmup"
    events.write_text('{"event": "phase", "name": "memory", "index": 2, "of": 9}\n')
    assert prove.progress_line(detail) == f"run {run_id}: running, memory 3 of 9"
    events.write_text('{"event": "start"}\n{"event": "pha')
    assert prove.progress_line(detail) == f"run {run_id}: running"


def test_a_live_worker_is_used_and_none_started(
    run: Run, tiny: tuple[str, ...], worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database()
    queue.beat_worker(database, WORKER)

    def work(_: float) -> None:
        held = queue.claim_next_run(database, WORKER)
        assert held is not None
        store_result(database, held.lease, ended(RunState.DONE))

    monkeypatch.setattr(prove.time, "sleep", work)
    code, _, _ = run("prove", *tiny)
    assert (code, worker.started) == (0, 0)


def test_a_worker_that_finds_another_one_at_work_leaves_the_run_to_it(
    run: Run, tiny: tuple[str, ...], worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database()

    def work(_: float) -> None:
        # The other worker, started at the same moment, shows its first sign of life only now.
        queue.beat_worker(database, WORKER)
        held = queue.claim_next_run(database, WORKER)
        if held is not None:
            store_result(database, held.lease, ended(RunState.DONE))

    monkeypatch.setattr(prove.time, "sleep", work)
    code, _, _ = run("prove", *tiny)
    assert (code, worker.started) == (0, 1)


def test_a_run_whose_worker_vanished_gets_a_worker_that_says_so(
    run: Run, tiny: tuple[str, ...], worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database()
    held: list[queue.HeldRun] = []

    class Recoverer(FakeWorker):
        def __init__(self, command: list[str], **_: Any) -> None:
            super().__init__(command)
            if held:
                store_result(database, held[0].lease, ended(RunState.LOST, why="vanished"))

    def take_and_vanish(_: float) -> None:
        found = queue.claim_next_run(database, WORKER)
        held.extend([found] if found else [])

    monkeypatch.setattr(prove.subprocess, "Popen", Recoverer)
    monkeypatch.setattr(prove.time, "sleep", take_and_vanish)
    code, out, _ = run("prove", *tiny)
    assert code == 1
    assert "lost" in out and "vanished" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--world", "moon"), "nccl, shared, solo, cpu"),
        (("--world", "solo"), "none is attached"),
        (("--model", "llama-3.1-405b", "--world", "cpu"), "this machine can give"),
        (("--tensor-parallel", "2"), "it is planned, not proven"),
        (("--attention", "triton"), "need a GPU; in the world cpu use eager or sdpa"),
        (("--loss", "fused_linear"), "need a GPU; in the world cpu use hf or chunked"),
        (("--optimizer", "adamw_8bit"), "need a GPU; in the world cpu use adamw_fused"),
    ],
)
def test_what_cannot_run_here_is_refused_before_it_is_queued(
    run: Run,
    worker: type[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    from planner import attached

    nothing = attached.AttachedGpus(gpus=(), reason="NVML sees no GPU.")
    monkeypatch.setattr(attached, "attached_gpus", lambda: nothing)
    code, _, err = run("prove", *arguments)
    assert code == 2
    assert words in err
    assert list_runs(open_database()) == []


def test_runs_lists_shows_and_cancels(run: Run) -> None:
    spec = {"schema": 1, "kind": "train_step", "world": "cpu", "plan": {}}
    run_id = create_run(open_database(), spec, idempotency_key="a")
    _, out, _ = run("runs", "--json")
    assert [line["id"] for line in json.loads(out)["runs"]] == [run_id]
    _, out, _ = run("runs")
    assert out.splitlines()[-2].split()[:3] == [run_id, "train_step", "-"]
    _, out, _ = run("runs", "show", run_id, "--json")
    assert json.loads(out)["events"][0]["to_state"] == "queued"
    code, out, _ = run("runs", "cancel", run_id, "--json")
    assert (code, json.loads(out)["state"]) == (0, "cancelled")
    code, out, _ = run("runs", "cancel", run_id)
    assert code == 0
    assert "ended already" in out


def test_no_runs_are_said_to_be_none(run: Run) -> None:
    _, out, _ = run("runs")
    assert out == "No runs yet: `peakmark prove` and `peakmark calibrate` make them.\n"


def test_a_run_without_a_plan_is_named_by_its_kind(run: Run) -> None:
    spec = {"schema": 1, "kind": "calibrate", "world": "cpu"}
    run_id = create_run(open_database(), spec, idempotency_key="c")
    _, out, _ = run("runs")
    assert out.splitlines()[-2].split()[:3] == [run_id, "calibrate", "-"]
    _, out, _ = run("runs", "show", run_id)
    assert out.splitlines() == [f"{run_id}: queued in world cpu", "calibrate"]


@pytest.mark.parametrize("command", ["show", "cancel"])
def test_a_run_that_is_not_there_is_one_sentence(run: Run, command: str) -> None:
    code, out, err = run("runs", command, "nothing", "--json")
    assert code == 2
    assert json.loads(out)["error"]["field"] == "id"
    assert "There is no run 'nothing'" in err


def test_an_export_loads_into_another_database_once(
    run: Run,
    tiny: tuple[str, ...],
    worker: type[FakeWorker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(worker, "result", ended(RunState.DONE, measured={"state": STATE}))
    run("prove", *tiny, "--world", "cpu")
    file = tmp_path / "rows.jsonl"
    _, out, _ = run("runs", "export", str(file), "--json")
    assert json.loads(out)["rows"] == 1
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", str(tmp_path / "other.db"))
    _, first, _ = run("import", str(file), "--json")
    _, second, _ = run("import", str(file), "--json")
    assert (json.loads(first)["loaded"], json.loads(second)["loaded"]) == (1, 0)
    _, out, _ = run("accuracy", str(file), "--json")
    from_file = json.loads(out)
    assert from_file["quantities"]["parameters state"]["n"] == 1


def test_import_names_the_row_that_is_wrong_and_loads_the_others(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    code, out, err = run("import", str(file), "--json")
    assert code == 1
    assert json.loads(out)["loaded"] == 0
    assert "rows.jsonl, line 1" in err


@pytest.mark.parametrize("command", ["accuracy", "import"])
def test_a_file_that_is_not_there_is_one_sentence(run: Run, command: str) -> None:
    code, _, err = run(command, "nowhere.jsonl")
    assert code == 2
    assert "nowhere.jsonl" in err and ("No such file" in err or "does not exist" in err)
    assert err.count("\n") == 1


def test_export_to_a_folder_that_is_not_there_is_one_sentence(run: Run) -> None:
    code, _, err = run("runs", "export", "nowhere/rows.jsonl")
    assert code == 2
    assert "cannot be written" in err


@pytest.mark.parametrize("command", [("runs",), ("accuracy",), ("prove",)])
def test_a_database_that_is_none_is_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    path = tmp_path / "text.db"
    path.write_text("this is not a database, whatever its name says\n" * 50)
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", str(path))
    code, out, err = run(*command, "--json")
    assert code == 2
    assert json.loads(out)["error"]["field"] == "database"
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_tiny_model_is_proved_on_the_cpu_to_the_byte(run: Run, tiny: tuple[str, ...]) -> None:
    code, out, err = run("prove", *tiny, "--world", "cpu", "--json")
    assert code == 0, err
    answer = json.loads(out)
    rows = {row["quantity"]: row for row in answer["comparison"]}
    for name in ("parameters state", "gradients state"):
        assert rows[name]["predicted"] == rows[name]["measured"]
    # Torch's AdamW also keeps a step counter of four bytes per group, which nobody plans for.
    optimizer = rows["optimizer state"]
    assert optimizer["measured"] - optimizer["predicted"] == 4 * 4
    assert answer["measured"]["allocated_bytes"] is None
    detail = get_run(open_database(), answer["summary"]["id"])
    assert detail is not None and detail.pid is not None
    assert not Path(f"/proc/{detail.pid}").exists() or _is_other(detail.pid)


def _is_other(pid: int) -> bool:
    """Whether a live process of this pid is none of ours (the number was used again)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return b"runners" not in Path(f"/proc/{pid}/cmdline").read_bytes()
