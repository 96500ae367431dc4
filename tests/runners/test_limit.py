"""The job `limit` finds what fits a machine whose limit is known, and keeps what it saw when it is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from db import repository
from db.types import RunState
from planner.plan import Plan, parse_plan
from runners.contract import JobKind, JobSpec, World
from runners.launch import job_command
from tests.runners.fake_limit import HANGS, LARGEST
from tests.runners.test_worker import Bench, bench, wait_for

__all__ = ["bench"]
HERE = Path(__file__).parent
CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def small_plan() -> Plan:
    return parse_plan(
        {
            "model": {"config": CONFIG, "name": "small"},
            "workload": {"sequence_length": 64},
            "parallelism": {"world_size": 2, "zero_stage": 3},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )


def limit_spec(predicted: int, **changes: Any) -> dict[str, Any]:
    asked = {"name": "micro_batch", "predicted": predicted, "max_runs": 16}
    spec = JobSpec(
        kind=JobKind.LIMIT,
        world=World.SOLO,
        plan=small_plan().to_dict(),
        limit=asked,
        deadline_s=60.0,
    )
    return {**spec.to_dict(), **changes}


def found(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Run the job over fake training steps and return its result."""
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, str(HERE / "fake_limit.py"), str(folder / "spec.json"), str(folder)]
    subprocess.run(command, check=False, timeout=60)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_the_limit_of_the_machine_is_found_and_every_run_is_kept(tmp_path: Path) -> None:
    result = found(tmp_path, limit_spec(10))
    limit = result["measured"]["limit"]
    assert (result["outcome"], limit["proven"]) == ("done", LARGEST)
    assert [(one["value"], one["outcome"]) for one in limit["trials"]] == [
        (10, "done"), (11, "done"), (13, "oom_device"), (12, "oom_device"),
    ]  # fmt: skip
    assert limit["trials"][0]["device_bytes"] == 10 * 2**30
    assert limit["trials"][0]["predicted_bytes"] > 2**28
    events = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").open()]
    assert [one["value"] for one in events if one["event"] == "trial"] == [10, 11, 13, 12]
    assert (tmp_path / "trials" / "11" / "spec.json").exists()


def test_a_run_that_says_nothing_of_memory_ends_the_search(tmp_path: Path) -> None:
    result = found(tmp_path, limit_spec(3))
    assert result["outcome"] == "failed"
    assert "the run with micro_batch 3 ended as failed" in result["error"]["message"]
    assert "the shapes do not match" in result["error"]["message"]


@pytest.mark.parametrize("world", ["cpu", "shared"])
def test_a_world_without_a_gpu_for_the_rank_is_refused(tmp_path: Path, world: str) -> None:
    result = found(tmp_path, limit_spec(8, world=world))
    assert result["outcome"] == "failed"
    assert "is proven on one, in the world nccl or solo" in result["error"]["message"]


def test_a_cancelled_search_keeps_what_it_saw(bench: Bench) -> None:
    run_id = bench.queue("", **limit_spec(HANGS - 1))
    bench.start_worker("--once")
    wait_for((bench.folder(run_id) / "trials" / str(HANGS) / "ready").exists)
    assert repository.request_cancel(bench.database, run_id, who="test")
    bench.wait_state(run_id, RunState.CANCELLED)
    detail = bench.run(run_id)
    assert detail.summary.why == "cancelled while it ran"
    assert detail.measured is not None
    limit = detail.measured["limit"]
    assert [(one["value"], one["outcome"]) for one in limit["trials"]] == [(HANGS - 1, "done")]
    assert limit["proven"] is None


def test_each_run_is_started_as_its_world_asks_and_the_search_as_one_process(
    tmp_path: Path,
) -> None:
    """The search of a plan of two ranks is one Python; its runs over NCCL are torchrun's."""
    spec = JobSpec.from_dict({**limit_spec(8), "world": "nccl"})
    assert job_command(spec, tmp_path)[1:3] == ["-m", "runners.jobs.limit"]
    run = JobSpec.from_dict({**limit_spec(8), "world": "nccl", "kind": "train_step", "limit": None})
    assert job_command(run, tmp_path)[1:3] == ["-m", "torch.distributed.run"]
