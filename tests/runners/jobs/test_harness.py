"""What every job leaves behind: events, a result, an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import PlanError
from runners.contract import JobKind, JobSpec
from runners.jobs.harness import (
    JobSession,
    allocator_variables,
    parse_requested_bytes,
    run_job,
)

SPEC = {"schema": 1, "kind": "attention", "world": "cpu", "attention": {}}
Run = Callable[[Callable[[JobSession], None]], tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    monkeypatch.setattr(sys, "argv", ["job", str(spec), str(tmp_path / "out")])

    def start(measure: Callable[[JobSession], None]) -> tuple[int, dict[str, Any]]:
        code = run_job(JobKind.ATTENTION, measure)
        return code, json.loads((tmp_path / "out" / "result.json").read_text())

    return start


def test_a_job_leaves_its_measurements_and_environment(run: Run) -> None:
    def measure(session: JobSession) -> None:
        session.measured["answer"] = 42

    code, result = run(measure)
    assert code == 0
    assert result["outcome"] == "done"
    assert result["measured"] == {"answer": 42}
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert result["error"] is None


def test_events_are_json_lines_with_utc_times(run: Run, tmp_path: Path) -> None:
    run(lambda session: session.events.phase("build", size=3))
    lines = (tmp_path / "out" / "events-rank0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["start", "phase", "end"]
    assert events[1] | {"t": ""} == {
        "t": "", "rank": 0, "event": "phase", "name": "build", "size": 3
    }  # fmt: skip
    assert events[1]["t"].endswith("Z")


def test_a_failure_keeps_what_was_measured_before_it(run: Run) -> None:
    def measure(session: JobSession) -> None:
        session.measured["phases"] = {"init": None}
        raise KeyError("missing")

    code, result = run(measure)
    assert code == 1
    assert result["outcome"] == "failed"
    assert result["measured"] == {"phases": {"init": None}}
    assert result["error"]["type"] == "KeyError"
    assert "measure" in "".join(result["error"]["traceback"])


def test_a_mistaken_plan_is_one_sentence_without_traceback(run: Run) -> None:
    def measure(session: JobSession) -> None:
        raise PlanError("workload.micro_batch", 0, "1 to 65536")

    code, result = run(measure)
    assert code == 1
    assert result["error"].keys() == {"type", "message"}


def test_out_of_device_memory_is_a_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (3, 10))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 5)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 6)

    def measure(session: JobSession) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")

    code, result = run(measure)
    assert code == 0
    assert result["outcome"] == "oom_device"
    assert result["error"]["requested_bytes"] == 3 * 2**29
    numbers = {k: v for k, v in result["error"].items() if k.endswith("_bytes")}
    assert numbers == {
        "requested_bytes": 1610612736,
        "free_bytes": 3,
        "total_bytes": 10,
        "allocated_bytes": 5,
        "reserved_bytes": 6,
    }


def test_out_of_memory_of_one_rank_ends_the_others_and_is_told_by_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (3, 10))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def measure(session: JobSession) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    code, result = run(measure)
    assert code == 1
    assert result["outcome"] == "oom_device"
    assert result["error"]["requested_bytes"] is None


def test_requested_bytes_are_read_from_both_wordings() -> None:
    assert parse_requested_bytes("CUDA out of memory. Tried to allocate 20.00 MiB.") == 20971520
    assert parse_requested_bytes("XPU: tried to allocate 512 bytes") == 512
    assert parse_requested_bytes("CUDA error: out of memory") is None


GROWING = "expandable_segments:True"


@pytest.mark.parametrize(
    ("asked", "environment", "variables"),
    [
        (False, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (True, {}, {"PYTORCH_ALLOC_CONF": GROWING}),
        (
            True,
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"},
            {"PYTORCH_ALLOC_CONF": f"max_split_size_mb:64,{GROWING}"},
        ),
        (
            True,
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {
                "PYTORCH_ALLOC_CONF": f"max_split_size_mb:64,{GROWING}",
                "PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{GROWING}",
            },
        ),
    ],
)
def test_a_plan_s_allocator_is_set_by_variables(
    asked: bool, environment: dict[str, str], variables: dict[str, str]
) -> None:
    plan = {"workload": {"expandable_segments": asked}, "model": {}, "parallelism": {}}
    spec = JobSpec.from_dict({"schema": 1, "kind": "train_step", "world": "cpu", "plan": plan})
    assert allocator_variables(spec, environment) == variables
