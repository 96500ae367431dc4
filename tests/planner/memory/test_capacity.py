"""A replayed step on GPUs that barely hold it, and with segments that grow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.hardware import custom_gpu, resolve_gpu
from planner.memory.training import TrainingMemory, training_memory
from planner.plan import parse_plan
from planner.predict import predict
from planner.units import MIB_BYTES
from planner.workload import TrainingWorkload

DOCUMENT = {
    "schema": 1,
    "job": "train",
    "model": {"preset": "meta-llama/Llama-3.2-1B"},
    "workload": {"sequence_length": 1024},
    "parallelism": {"engine": "peakmark", "zero_stage": 0, "world_size": 1},
    "hardware": {"preset": "h200-sxm5-141gb"},
}
PLAN = parse_plan(DOCUMENT)
assert isinstance(PLAN.workload, TrainingWorkload)
WORKLOAD = PLAN.workload
# Named as the GPU that was measured, so that the context is the same.
RATES = {"mem_bandwidth_bytes_s": 1e12, "peak_dense_flop_s": {"bf16": 1e14}}


def _on(visible_bytes: int, workload: TrainingWorkload = WORKLOAD) -> TrainingMemory:
    gpu = custom_gpu({"name": "H200, cut", "visible_bytes": visible_bytes, **RATES})
    # Workspaces are those of a Hopper GPU.
    gpu = replace(gpu, compute_capability="9.0")
    return training_memory(PLAN.model, workload, PLAN.parallelism, gpu)


def _roomy(workload: TrainingWorkload = WORKLOAD) -> TrainingMemory:
    return training_memory(PLAN.model, workload, PLAN.parallelism, resolve_gpu("h200"))


def test_a_step_gives_back_segments_where_memory_is_short() -> None:
    roomy = _roomy()
    assert roomy.overheads.segment_bytes > 100 * MIB_BYTES
    visible = roomy.overheads.device_bytes - 200 * MIB_BYTES
    short = _on(visible)
    # Other blocks may be a little larger than their tensors.
    assert short.allocated_bytes == pytest.approx(roomy.allocated_bytes, rel=1e-3)
    assert short.overheads.device_bytes <= visible
    assert "given back" in short.overheads.segment_formula


def test_a_gpu_that_cannot_hold_the_step_says_what_a_large_one_would_take() -> None:
    roomy = _roomy()
    visible = roomy.allocated_bytes
    small = _on(visible)
    assert small.overheads.device_bytes == roomy.overheads.device_bytes
    assert "given back" not in small.overheads.segment_formula


def test_segments_that_grow_hold_less_without_a_tensor() -> None:
    fixed, grown = _roomy(), _roomy(replace(WORKLOAD, expandable_segments=True))
    assert grown.overheads.segment_bytes < fixed.overheads.segment_bytes
    # What is left of a block is always split off, so no more counts as allocated.
    assert grown.allocated_bytes <= fixed.allocated_bytes
    reserved_mib = grown.overheads.reserved_bytes / MIB_BYTES
    # Whole granules of 2 MiB make it even; the large pool's are 20 MiB.
    assert reserved_mib == int(reserved_mib)


def test_a_plan_may_ask_for_segments_that_grow() -> None:
    document = {**DOCUMENT, "workload": {"sequence_length": 1024, "expandable_segments": True}}
    asked, plain = predict(parse_plan(document)).to_dict(), predict(PLAN).to_dict()
    assert asked["plan"]["workload"]["expandable_segments"] is True
    assert asked["memory"]["reserved_bytes"] < plain["memory"]["reserved_bytes"]
