"""Rows of two documents: what their masks take, by hand."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.memory.ledger import kept_parts
from planner.memory.templates import traced
from planner.memory.training import attention_notes, training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import Attention, Checkpointing, Parallelism, Precision, TrainingWorkload

BATCH, LENGTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 1500, 32, 32, 8, 128
LLAMA = resolve_model("meta-llama/Llama-3.1-8B")


def _kept(packed: bool, attention: Attention, checkpointing: Checkpointing) -> dict[str, int]:
    workload = TrainingWorkload(
        sequence_length=LENGTH,
        micro_batch=BATCH,
        attention=attention,
        checkpointing=checkpointing,
        packed=packed,
    )
    parts = kept_parts(LLAMA, traced(LLAMA, workload, LENGTH), BATCH, LENGTH)
    return {name: int(size) for name, size in parts.items()}


def test_sdpa_keeps_a_mask_and_whole_keys_and_values_in_every_layer() -> None:
    one, two = (_kept(packed, Attention.SDPA, Checkpointing.NONE) for packed in (False, True))
    # The mask of documents in bf16, made from the boolean one by every call.
    assert one.get("attention", 0) == 0
    assert two["attention"] == LAYERS * BATCH * LENGTH**2 * 2
    # Keys and values of every query head in bf16; cosines and sines of every row's own positions.
    copies = LAYERS * 2 * BATCH * LENGTH * (HEADS - KV_HEADS) * HEAD_DIM * 2
    rotary = 2 * (BATCH - 1) * LENGTH * HEAD_DIM * 2
    assert two["activations"] - one["activations"] == copies + rotary


def test_eager_keeps_what_it_keeps_of_one_document_but_for_the_positions() -> None:
    one, two = (_kept(packed, Attention.EAGER, Checkpointing.NONE) for packed in (False, True))
    assert two["attention"] == one["attention"]
    rotary = 2 * (BATCH - 1) * LENGTH * HEAD_DIM * 2
    assert two["activations"] - one["activations"] == rotary


@pytest.mark.parametrize(
    ("attention", "mask_itemsize"), [(Attention.SDPA, 1), (Attention.EAGER, 2)]
)
def test_checkpointed_layers_share_the_model_s_mask(
    attention: Attention, mask_itemsize: int
) -> None:
    two = _kept(True, attention, Checkpointing.FULL)
    assert two["attention"] == BATCH * LENGTH**2 * mask_itemsize


@pytest.mark.parametrize(
    ("attention", "lora_rank"), [(Attention.EAGER, 0), (Attention.SDPA, 0), (Attention.SDPA, 16)]
)
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_formulas_and_replay_see_the_same_peak(
    attention: Attention, checkpointing: Checkpointing, lora_rank: int
) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 5})
    workload = TrainingWorkload(
        sequence_length=900,
        attention=attention,
        checkpointing=checkpointing,
        packed=True,
        lora_rank=lora_rank,
    )
    ranks = Parallelism(zero_stage=3, world_size=4)
    check_training(spec, workload, ranks)
    replayed = training_memory(spec, workload, ranks).allocated_bytes
    summed = training_memory(spec, workload, ranks, segment_share=0.1).allocated_bytes
    assert replayed == pytest.approx(summed, rel=0.01)


def _refusal(name: str = "llama-3.1-8b", **chosen: object) -> str:
    workload = TrainingWorkload(packed=True, **chosen)
    with pytest.raises(PlanError) as caught:
        check_training(resolve_model(name), workload, Parallelism())
    return str(caught.value)


def test_what_cannot_be_packed_is_said() -> None:
    triton = _refusal(attention=Attention.TRITON)
    assert (
        "no step with several documents in a row has been traced with it; use eager or sdpa"
        in triton
    )
    assert "at least 2" in _refusal(sequence_length=1)
    assert "workload.packed is True" in _refusal("microsoft/Phi-3-mini-4k-instruct")
    assert "or workload.precision mixed, bf16" in _refusal(precision=Precision.FP32)


def test_the_plan_says_what_the_mask_costs() -> None:
    (note,) = attention_notes(LLAMA, TrainingWorkload(packed=True))
    assert "every layer keeps it" in note
    assert not attention_notes(LLAMA, TrainingWorkload(packed=True, attention=Attention.EAGER))
