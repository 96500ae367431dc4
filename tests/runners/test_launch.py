from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from runners.contract import JobKind, JobSpec, World
from runners.launch import job_command, job_environment, num_ranks

FOLDER = Path("/data/runs/r1")


def spec(world: World, world_size: int = 1, **changes: Any) -> JobSpec:
    plan = {"parallelism": {"world_size": world_size}}
    return JobSpec(kind=JobKind.TRAIN_STEP, world=world, plan=plan, **changes)


def test_one_rank_is_one_python() -> None:
    expected = [
        *(sys.executable, "-m", "runners.jobs.train_step"),
        *("/data/runs/r1/spec.json", "/data/runs/r1"),
    ]
    assert job_command(spec(World.CPU), FOLDER) == expected
    assert job_command(spec(World.SOLO, 64), FOLDER) == expected


@pytest.mark.parametrize("world", [World.CPU, World.SHARED, World.NCCL])
def test_several_ranks_are_started_by_torchrun(world: World) -> None:
    command = job_command(spec(world, 4), FOLDER)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert command[command.index("--log-dir") + 1] == "/data/runs/r1/ranks"
    assert command[-4:-2] == ["-m", "runners.jobs.train_step"]


def test_a_world_that_no_host_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size is 64, it must be from 1 to 16"):
        job_command(spec(World.CPU, 64), FOLDER)
    assert num_ranks(spec(World.SOLO, 65536)) == 1


def test_an_attention_job_has_one_rank() -> None:
    attention = JobSpec(kind=JobKind.ATTENTION, world=World.SOLO, attention={})
    assert job_command(attention, FOLDER)[2] == "runners.jobs.attention"


def test_the_environment_is_an_allow_list() -> None:
    parent = {
        "PATH": "/bin",
        "CUDA_HOME": "/cuda",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HF_TOKEN": "y",
        "LD_PRELOAD": "z",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    kept = {"PATH": "/bin", "CUDA_HOME": "/cuda", "NCCL_DEBUG": "INFO"}
    set_by_us = {"PEAKMARK_RUN_ID": "r1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    set_by_us["PEAKMARK_TRACED"] = str(Path.cwd() / "var" / "traced")
    for gpu_uuids, visible in ((None, "1"), ((), ""), (("GPU-a", "GPU-b"), "GPU-a,GPU-b")):
        assert job_environment("r1", gpu_uuids, parent) == {
            **kept,
            **set_by_us,
            "CUDA_VISIBLE_DEVICES": visible,
        }


def test_a_job_finds_the_traces_beside_a_database_that_it_does_not_see() -> None:
    environment = job_environment("r1", None, {"PEAKMARK_DATABASE_URL": "/data/peakmark.db"})
    assert environment["PEAKMARK_TRACED"] == "/data/traced"
    assert "PEAKMARK_DATABASE_URL" not in environment
