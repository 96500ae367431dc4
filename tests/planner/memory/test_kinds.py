"""The kinds of layers, and what plans whose layers differ keep, by hand."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.memory.kinds import (
    CHECKPOINTED,
    FROZEN,
    PLAIN,
    SLIDING,
    contexts,
    layer_kinds,
    wider_contexts,
)
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import Attention, Checkpointing, Parallelism, TrainingWorkload

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
GEMMA = resolve_model("google/gemma-2-9b")


def test_every_kth_layer_is_checkpointed_from_the_first() -> None:
    workload = TrainingWorkload(checkpointing=Checkpointing.FULL, checkpoint_every=3)
    kinds = layer_kinds(LLAMA, workload)
    assert [layer for layer, kind in enumerate(kinds) if kind == CHECKPOINTED] == [*range(0, 32, 3)]
    assert set(kinds) == {PLAIN, CHECKPOINTED}


def test_the_first_layers_are_frozen() -> None:
    kinds = layer_kinds(LLAMA, TrainingWorkload(frozen_layers=5))
    assert kinds == (FROZEN,) * 5 + (PLAIN,) * 27


def test_windows_matter_by_layer_and_kernel() -> None:
    eager = TrainingWorkload(attention=Attention.EAGER, sequence_length=512)
    assert layer_kinds(GEMMA, eager)[:3] == (SLIDING, PLAIN, SLIDING)
    triton = TrainingWorkload(attention=Attention.TRITON, sequence_length=512)
    assert set(layer_kinds(GEMMA, triton)) == {PLAIN}


def test_traits_add_up_in_one_order() -> None:
    workload = TrainingWorkload(
        attention=Attention.EAGER, checkpointing=Checkpointing.FULL, frozen_layers=1
    )
    assert layer_kinds(GEMMA, workload)[:2] == ("sliding+checkpointed+frozen", CHECKPOINTED)


def test_a_context_is_a_layer_between_its_neighbours() -> None:
    assert contexts(("a", "b")) == ("^|a|b", "a|b|$")
    assert contexts(("a",)) == ("^|a|$",)
    assert wider_contexts("a|b|$") == ("a|b|$", "*|b|$", "*|b|$")
    assert wider_contexts("^|a|b") == ("^|a|b", "^|a|b", "^|a|*")


def kept_bytes(every: int) -> int:
    """What the layers of Llama keep at the end of the forward, at 1,024 tokens."""
    workload = TrainingWorkload(
        sequence_length=1024, checkpointing=Checkpointing.FULL, checkpoint_every=every
    )
    memory = training_memory(LLAMA, workload, Parallelism(world_size=1, zero_stage=0))
    parts = memory.by_phase["loss_backward"].parts
    return round(parts["activations"])


def test_each_layer_left_alone_keeps_its_tensors_instead_of_its_input() -> None:
    # A layer keeps 200,840 bytes per token (test_templates), a checkpointed one 2 x 4096; the
    # output of a layer before a checkpointed one is that input, so it is counted there.
    every_layer, every_second = kept_bytes(1), kept_bytes(2)
    per_token = (every_second - every_layer) / 1024
    assert per_token == 16 * (200_840 - 2 * 4096)


def test_a_number_of_layers_without_checkpointing_is_refused() -> None:
    with pytest.raises(PlanError, match="no layer is checkpointed"):
        check_training(LLAMA, TrainingWorkload(checkpoint_every=2), Parallelism())
