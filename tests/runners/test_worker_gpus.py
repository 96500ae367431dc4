from __future__ import annotations

import pytest

from planner.attached import AttachedGpu
from planner.units import GIB_BYTES
from runners.contract import JobKind, JobSpec, World
from runners.worker_gpus import choose_gpus


def gpu(index: int, used_gib: float = 0.5) -> AttachedGpu:
    return AttachedGpu(
        index=index,
        name="NVIDIA H200",
        uuid=f"GPU-{index}{index}",
        total_bytes=140 * GIB_BYTES,
        used_bytes=int(used_gib * GIB_BYTES),
        driver="580",
        compute_processes=0,
        sm_clock_mhz=None,
        memory_clock_mhz=None,
        temperature_c=None,
        throttle_reasons=(),
        preset_id=None,
    )


def spec(world: World, world_size: int = 1, device: str | None = None) -> JobSpec:
    plan = {"parallelism": {"world_size": world_size}}
    return JobSpec(kind=JobKind.TRAIN_STEP, world=world, plan=plan, device=device)


def test_a_solo_run_takes_the_emptiest_gpu() -> None:
    gpus = [gpu(0, 1.5), gpu(1, 0.1), gpu(2, 0.9)]
    assert choose_gpus(spec(World.SOLO, 64), gpus, None) == ("GPU-11",)


def test_nccl_takes_one_gpu_per_rank_or_says_how_many_there_are() -> None:
    gpus = [gpu(0), gpu(1), gpu(2, 0.1)]
    assert choose_gpus(spec(World.NCCL, 2), gpus, None) == ("GPU-22", "GPU-00")
    with pytest.raises(ValueError, match="needs 4 GPUs and 3 can be used here"):
        choose_gpus(spec(World.NCCL, 4), gpus, None)


@pytest.mark.parametrize("visible", ["1", "GPU-11", " 1 ", "GPU-1"])
def test_a_run_never_exceeds_what_the_worker_may_see(visible: str) -> None:
    assert choose_gpus(spec(World.SOLO), [gpu(0, 0.0), gpu(1)], visible) == ("GPU-11",)


def test_no_visible_gpu_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="needs 1 GPUs and 0 can be used here"):
        choose_gpus(spec(World.SOLO), [gpu(0)], "")


def test_a_named_device_counts_among_those_visible() -> None:
    gpus = [gpu(0), gpu(1), gpu(2)]
    assert choose_gpus(spec(World.SOLO, device="cuda:1"), gpus, "2,1") == ("GPU-11",)
    assert choose_gpus(spec(World.SOLO, device="cuda"), gpus, None) == ("GPU-00",)
    for wrong in ("cuda:3", "cuda:-1", "cuda:x", "tpu:0"):
        with pytest.raises(ValueError, match="it must be one of the 3 GPUs"):
            choose_gpus(spec(World.SOLO, device=wrong), gpus, None)


def test_a_busy_gpu_is_refused_with_what_is_taken() -> None:
    with pytest.raises(ValueError, match=r"GPU 0 \(NVIDIA H200\) is busy: .* 70.00 GiB"):
        choose_gpus(spec(World.SOLO), [gpu(0, 70)], None)
    assert choose_gpus(spec(World.SOLO), [gpu(0, 70), gpu(1)], None) == ("GPU-11",)
