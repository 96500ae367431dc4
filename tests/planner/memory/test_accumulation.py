"""Gradient accumulation with and without a reduction after each micro-batch."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.memory.fsdp2 import Fsdp2States
from planner.memory.groups import Place
from planner.memory.states import PeakmarkStates
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import (
    Checkpointing,
    Engine,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)

SPEC = resolve_model("meta-llama/Llama-3.1-8B")  # every dimension divides by 8
FORWARD, IN_BACKWARD = Place("head"), Place("layer_backward", 3)


def _peakmark(stage: int, syncs: bool) -> PeakmarkStates:
    plan = (SPEC, Precision.MIXED, Optimizer.ADAMW_FUSED, stage, 8)
    return PeakmarkStates(*plan, accumulates=True, syncs=syncs)


def test_our_stages_keep_a_shard_or_the_whole_gradient() -> None:
    # The reduction of layer 4 reads its whole gradient while the backward of layer 3 runs.
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    for place, read in ((FORWARD, 0), (IN_BACKWARD, layer)):
        shards = SPEC.parameters // 8
        assert _peakmark(3, syncs=True).at(place)["gradients"] == 2 * (shards + read)
        assert _peakmark(3, syncs=False).at(place)["gradients"] == 2 * SPEC.parameters
    assert _peakmark(3, syncs=False).optimizer_step()["gradients"] == 2 * SPEC.parameters // 8
    for syncs in (True, False):
        assert _peakmark(1, syncs=syncs).at(FORWARD)["gradients"] == 2 * SPEC.parameters


@pytest.mark.parametrize(
    ("precision", "itemsize", "gradients"),
    [(Precision.MIXED, 4, "kept"), (Precision.BF16, 2, "added"), (Precision.FP32, 4, "added")],
)
def test_fsdp2_keeps_whole_gradients_in_the_dtype_of_the_reduction(
    precision: Precision, itemsize: int, gradients: str
) -> None:
    plan = (SPEC, precision, Optimizer.ADAMW_FUSED, 3, 8)
    states = Fsdp2States(*plan, accumulates=True, syncs=False)
    assert states.at(FORWARD)["gradients"] == itemsize * SPEC.parameters
    assert states.gradients == gradients
    synced = Fsdp2States(*plan, accumulates=True)
    assert synced.at(FORWARD)["gradients"] == itemsize * SPEC.parameters // 8


@pytest.mark.parametrize("engine", [Engine.PEAKMARK, Engine.FSDP2])
@pytest.mark.parametrize("precision", [Precision.MIXED, Precision.BF16])
def test_formulas_and_replay_agree_without_sync(engine: Engine, precision: Precision) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 6})
    for stage in (2, 3):
        for accumulation in (2, 4):
            workload = TrainingWorkload(
                sequence_length=512,
                precision=precision,
                grad_accumulation=accumulation,
                sync_each_micro_batch=False,
                checkpointing=Checkpointing.FULL,
            )
            ranks = Parallelism(engine=engine, zero_stage=stage, world_size=8)
            replayed = training_memory(spec, workload, ranks).allocated_bytes
            summed = training_memory(spec, workload, ranks, segment_share=0.1).allocated_bytes
            assert replayed == pytest.approx(summed, rel=0.03)


@pytest.mark.parametrize(("engine", "stage"), [(Engine.DDP, 0), (Engine.ZERO_REDUNDANCY, 1)])
def test_ddp_keeps_unreduced_gradients_beside_its_buckets(engine: Engine, stage: int) -> None:
    ranks = Parallelism(engine=engine, zero_stage=stage, world_size=8)

    def allocated(syncs: bool, share: float | None) -> int:
        workload = TrainingWorkload(
            sequence_length=512,
            precision=Precision.BF16,
            grad_accumulation=2,
            sync_each_micro_batch=syncs,
        )
        return training_memory(SPEC, workload, ranks, segment_share=share).allocated_bytes

    assert allocated(False, 0.1) == allocated(True, 0.1) + 2 * SPEC.parameters
    assert allocated(False, None) == pytest.approx(allocated(False, 0.1), rel=0.01)


def test_deepspeed_says_that_it_is_not_predicted() -> None:
    workload = TrainingWorkload(grad_accumulation=2, sync_each_micro_batch=False)
    ranks = Parallelism(engine=Engine.DEEPSPEED, zero_stage=2)
    with pytest.raises(PlanError, match="not predicted for deepspeed; use true"):
        check_training(SPEC, workload, ranks)
