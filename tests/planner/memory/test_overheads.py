"""What lies outside torch's allocator, against the rows that gave the constants and their like."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanError
from planner.hardware import Gpu, resolve_gpu
from planner.memory.overheads import (
    NCCL_OVERHEAD,
    Overheads,
    attention_workspace_bytes,
    outside_bytes,
)
from planner.memory.replay import Replayed
from planner.plan import parse_plan
from planner.presets import resolve_model
from planner.records import Kind, RecordedRow, Role, read_file
from planner.units import MIB_BYTES
from planner.workload import Attention, Engine, Precision, TrainingWorkload

RECORDED = Path(__file__).resolve().parents[3] / "recorded"
H200 = resolve_gpu("h200")
SDPA = TrainingWorkload(attention=Attention.SDPA)
CONSTANTS = ("1c2507ecdbc36aec", "8284ade325cc72fb", "29cb8b7c8512fe38", "546e327316166a94")


def _mib(engine: Engine, ranks: int, **changes: Any) -> tuple[float, float]:
    outside = outside_bytes(replace(SDPA, **changes), engine, ranks, H200)
    return outside.context_bytes / MIB_BYTES, outside.nccl_bytes / MIB_BYTES


def test_context_by_engine_and_attention() -> None:
    # Measured: 750.8 MiB with triton, 766.9 with SDPA's bf16 kernels, 836.8 with FSDP2 on top.
    assert _mib(Engine.PEAKMARK, 1, attention=Attention.TRITON) == (751, 0)
    assert _mib(Engine.PEAKMARK, 1, attention=Attention.EAGER) == (751, 0)
    assert _mib(Engine.PEAKMARK, 1) == (767, 0)
    assert _mib(Engine.FSDP2, 1) == (837, 0)


def test_sdpa_in_fp32_loads_no_fused_bf16_kernel() -> None:
    assert _mib(Engine.PEAKMARK, 1, precision=Precision.FP32) == (751, 0)


def test_both_engines_hold_the_same_with_a_communicator() -> None:
    # 1,609 MiB measured on two GPUs for either.
    assert sum(_mib(Engine.PEAKMARK, 2)) == 1609
    assert sum(_mib(Engine.FSDP2, 2)) == 1609


def test_more_ranks_take_the_published_ratio_and_its_doubt() -> None:
    outside = outside_bytes(SDPA, Engine.PEAKMARK, 8, H200)
    # Together: what side streams add is in the 842 MiB, and in the context of one rank alone.
    alone = outside_bytes(SDPA, Engine.PEAKMARK, 1, H200).context_bytes
    together_bytes = outside.context_bytes + outside.nccl_bytes
    assert together_bytes == alone + round(842 * MIB_BYTES * 688 / 544)
    assert outside.doubt_bytes == round(outside.nccl_bytes / 2)
    assert outside_bytes(SDPA, Engine.PEAKMARK, 2, H200).doubt_bytes == 0


def test_a_gpu_that_was_not_measured_says_so() -> None:
    other: Gpu = resolve_gpu("a100-sxm4-80gb")
    outside = outside_bytes(SDPA, Engine.PEAKMARK, 1, other)
    assert outside.doubt_bytes == 400 * MIB_BYTES
    assert "not measured on this GPU" in outside.context_formula


def test_an_array_of_ranks_gives_what_each_gives() -> None:
    ranks = np.array([1, 2, 8, 1024])
    found = outside_bytes(SDPA, Engine.FSDP2, ranks, H200)
    for index, number in enumerate(ranks.tolist()):
        alone = outside_bytes(SDPA, Engine.FSDP2, number, H200)
        assert found.nccl_bytes[index] == alone.nccl_bytes
        assert found.doubt_bytes[index] == alone.doubt_bytes


def test_the_parts_sum_to_device_bytes() -> None:
    over = Overheads.replayed(
        1000, Replayed(1000, 1500), outside_bytes(SDPA, Engine.PEAKMARK, 2, H200)
    )
    assert [row["name"] for row in over.rows()] == ["segments", "context", NCCL_OVERHEAD]
    assert 1000 + sum(row["bytes"] for row in over.rows()) == over.device_bytes


def _rows() -> list[RecordedRow]:
    return [row for path in sorted(RECORDED.glob("*.jsonl")) for row in read_file(path)]


def test_the_rows_that_gave_the_constants_are_calibration() -> None:
    roles = {row.id: row.role for row in _rows()}
    assert {roles[row_id] for row_id in CONSTANTS} == {Role.CALIBRATION}


# Our engine's collectives have had a stream of their own, which takes memory, since then.
SIDE_STREAMS_SINCE = datetime(2026, 11, 29, 21, 0, tzinfo=UTC)


@pytest.mark.parametrize("world", ["solo", "nccl"])
def test_what_recorded_h200_steps_held_outside_the_allocator(world: str) -> None:
    """To 2 MiB in nine of ten rows that gave no constant; ranks alone have no communicator."""
    gaps = []
    for row in _rows():
        is_done = row.kind is Kind.TRAIN_STEP and row.outcome == "done"
        if not is_done or row.spec["world"] != world or row.id in CONSTANTS:
            continue
        seen = row.measured
        try:
            plan = parse_plan(row.spec["plan"])
        except PlanError:  # reported by the accuracy test
            continue
        assert isinstance(plan.workload, TrainingWorkload)
        ranks, engine = plan.parallelism.world_size, plan.parallelism.engine
        if engine is Engine.PEAKMARK and ranks > 1 and row.recorded_at < SIDE_STREAMS_SINCE:
            continue
        # Fewer device than reserved bytes were read after segments had been given back.
        is_peak = (seen.get("device_bytes") or 0) > seen["reserved_bytes"]
        if is_peak and _known(engine, ranks, world):
            outside = outside_bytes(plan.workload, engine, ranks, H200)
            expected = outside.context_bytes + (outside.nccl_bytes if world == "nccl" else 0)
            gaps.append(abs(seen["device_bytes"] - seen["reserved_bytes"] - expected))
    assert len(gaps) > 5
    assert np.quantile(gaps, 0.9) <= 2 * MIB_BYTES


def _known(engine: Engine, ranks: int, world: str) -> bool:
    """Whether something like it was measured when the constants were chosen."""
    return engine in (Engine.PEAKMARK, Engine.FSDP2) and (world == "solo" or ranks == 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "workspace_bytes"),
    [
        (64, 8, 1024, 67_371_264),  # Llama 3.1 70B
        (32, 8, 4096, 134_742_272),  # Llama 3.1 8B
        (16, 8, 4096, 67_371_264),  # Qwen3 1.7B
        (32, 32, 4096, 67_633_408),  # Llama 2 7B: no heads share keys and values
    ],
)
def test_cudnn_s_backward_has_the_workspace_seen_on_an_h200(
    heads: int, kv_heads: int, length: int, workspace_bytes: int
) -> None:
    """Allocator snapshots, torch 2.11 and cuDNN 9: heads of 128, one row, to the byte."""
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    spec = resolve_model("meta-llama/Llama-3.1-8B", config)
    workload = TrainingWorkload(sequence_length=length, attention=Attention.SDPA)
    assert attention_workspace_bytes(spec, workload, None) == workspace_bytes
    for other in (Attention.EAGER, Attention.TRITON):
        assert not attention_workspace_bytes(spec, replace(workload, attention=other), None)
    fp32 = replace(workload, precision=Precision.FP32)
    assert not attention_workspace_bytes(spec, fp32, None)
    assert not attention_workspace_bytes(spec, workload, resolve_gpu("a100-sxm4-80gb"))
