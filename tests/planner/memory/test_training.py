"""The whole training prediction: sums, orders, the grid, and a peak counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.memory.training import attention_notes, training_grid, training_memory
from planner.presets import resolve_model
from planner.units import MIB_BYTES
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)

SPEC = resolve_model("meta-llama/Llama-3.1-8B")
SHALLOW = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 6})  # quick to replay
WORKLOADS = st.builds(
    TrainingWorkload,
    sequence_length=st.integers(1, 65536),
    micro_batch=st.integers(1, 64),
    grad_accumulation=st.integers(1, 3),
    optimizer=st.sampled_from(Optimizer),
    precision=st.sampled_from(Precision),
    attention=st.sampled_from(Attention),
    checkpointing=st.sampled_from(Checkpointing),
).filter(
    # Selective checkpointing is traced where matrices multiply in bf16 (see test_replay).
    lambda workload: (
        workload.checkpointing is not Checkpointing.SELECTIVE
        or workload.precision in (Precision.MIXED, Precision.BF16)
    )
)
PARALLELISMS = st.builds(
    Parallelism,
    engine=st.just(Engine.PEAKMARK),
    zero_stage=st.integers(0, 3),
    world_size=st.integers(1, 4096),
) | st.builds(
    Parallelism,
    engine=st.just(Engine.FSDP2),
    zero_stage=st.integers(2, 3),
    world_size=st.integers(1, 4096),
)


@settings(max_examples=60, deadline=None)
@example(
    # The replay finds a lower peak than the formulas, and another phase beside it.
    workload=TrainingWorkload(
        sequence_length=3,
        micro_batch=42,
        precision=Precision.FP32,
        attention=Attention.EAGER,
    ),
    parallelism=Parallelism(engine=Engine.FSDP2, zero_stage=2, world_size=1),
)
@given(workload=WORKLOADS, parallelism=PARALLELISMS)
def test_the_ledger_sums_to_the_peak_and_to_its_components(
    workload: TrainingWorkload, parallelism: Parallelism
) -> None:
    memory = training_memory(SHALLOW, workload, parallelism).to_dict()
    total = memory["allocated_bytes"]
    assert sum(row["bytes"] for row in memory["ledger"]) == pytest.approx(total, rel=1e-12, abs=16)
    assert sum(part["bytes"] for part in memory["components"]) == total
    for phase in memory["phases"]:
        assert sum(phase["parts"].values()) == phase["allocated_bytes"] <= total
    assert max(phase["allocated_bytes"] for phase in memory["phases"]) == total


@settings(max_examples=40, deadline=None)
@given(workload=WORKLOADS, parallelism=PARALLELISMS)
def test_more_tokens_never_need_less(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    def peak(workload: TrainingWorkload) -> int:
        # By the formulas: which blocks the allocator reuses does not grow with every token.
        return training_memory(SPEC, workload, parallelism, segment_share=0.12).allocated_bytes

    longer = replace(workload, sequence_length=workload.sequence_length + 1)
    wider = replace(workload, micro_batch=workload.micro_batch + 1)
    assert peak(longer) >= peak(workload)
    assert peak(wider) >= peak(workload)


@settings(max_examples=40, deadline=None)
@given(workload=WORKLOADS, world_size=st.integers(2, 1024))
def test_each_stage_keeps_no_more_state_than_the_one_before(
    workload: TrainingWorkload, world_size: int
) -> None:
    def states(stage: int) -> int:
        parallelism = Parallelism(zero_stage=stage, world_size=world_size)
        memory = training_memory(SPEC, workload, parallelism, segment_share=0.12)
        parts = memory.by_phase["optimizer"].parts
        return int(parts["parameters"] + parts["optimizer"] + parts["gradients"])

    # Stage 0 pads to the world size too, so the order holds to the byte.
    assert states(0) >= states(1) >= states(2) >= states(3)


@pytest.mark.parametrize("engine", [Engine.PEAKMARK, Engine.FSDP2])
def test_the_grid_says_what_single_plans_say(engine: Engine) -> None:
    workload = TrainingWorkload(grad_accumulation=2)
    axes = ((2, 3), (1, 3, 64), (1, 5), (17, 4096))
    grid = training_grid(SPEC, workload, engine, *axes)["allocated_bytes"]
    for index in np.ndindex(grid.shape):
        stage, ranks, batch, length = (axis[i] for axis, i in zip(axes, index, strict=True))
        single = training_memory(
            SPEC,
            replace(workload, micro_batch=batch, sequence_length=length),
            Parallelism(engine=engine, zero_stage=stage, world_size=ranks),
            segment_share=0.12,
        )
        assert grid[index] == single.allocated_bytes


def test_the_optimizer_step_of_one_rank_counted_by_hand() -> None:
    workload = TrainingWorkload(sequence_length=1, precision=Precision.MIXED)
    ranks = Parallelism(zero_stage=0, world_size=1)
    memory = training_memory(SPEC, workload, ranks, segment_share=0.12)
    # 16 B per parameter, the largest group's gradient in fp32, two 32 MiB cuBLAS workspaces.
    largest_group = 128256 * 4096 + 4096
    by_hand = 16 * SPEC.parameters + 4 * largest_group + 64 * MIB_BYTES
    assert round(memory.by_phase["optimizer"].total_bytes) == by_hand
    assert memory.peak_phase == "optimizer"


def test_windows_switch_templates_along_a_grid() -> None:
    spec = resolve_model("mistralai/Mistral-7B-v0.1")
    lengths = (4095, 4096)
    grid = training_grid(spec, TrainingWorkload(), Engine.PEAKMARK, (3,), (8,), (1,), lengths)
    short, long = grid["allocated_bytes"][0, 0, 0]
    # Per layer a 16-bit additive mask of the sequence squared, and K and V copied to 32 heads.
    mask_bytes = 32 * 2 * 4096 * 4096
    copies_bytes = 32 * 2 * 2 * 4096 * (32 - 8) * 128
    assert mask_bytes < long - short < 1.3 * (mask_bytes + copies_bytes)


def test_a_hidden_quadratic_term_is_told() -> None:
    fp32 = TrainingWorkload(precision=Precision.FP32)
    assert "keeps the scores" in attention_notes(SPEC, fp32)[0]
    assert attention_notes(resolve_model("meta-llama/Llama-2-7b-hf"), fp32) == ()
    assert attention_notes(SPEC, TrainingWorkload()) == ()
    windowed = resolve_model("mistralai/Mistral-7B-v0.1")
    assert "From 4,096 tokens on" in attention_notes(windowed, TrainingWorkload())[0]
    assert attention_notes(windowed, TrainingWorkload(sequence_length=4095)) == ()


def test_what_64_bits_cannot_count_is_not_replayed() -> None:
    workload = TrainingWorkload(sequence_length=2**24, micro_batch=2**16, attention=Attention.EAGER)
    memory = training_memory(SPEC, workload, Parallelism())
    # 32 layers keep scores of 32 heads in bf16 at least.
    assert memory.peak.parts["attention"] >= 32 * 2**16 * 32 * 2**48 * 2
    assert min(memory.peak.parts.values()) >= 0
    assert memory.overheads.segment_bytes == pytest.approx(0.12 * memory.allocated_bytes)
