"""Selective checkpointing saves matrix products and attention, and computes the same gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.workload import Checkpointing
from runners.jobs.checkpointing import checkpoint_layers
from runners.zero.groups import decoder_layers

FIELDS = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def gradients(checkpointing: Checkpointing, every: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FIELDS)).train()
    checkpoint_layers(model, checkpointing, every)
    tokens = torch.randint(37, (2, 16))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("checkpointing", [Checkpointing.FULL, Checkpointing.SELECTIVE])
def test_gradients_do_not_depend_on_checkpointing(checkpointing: Checkpointing, every: int) -> None:
    expected = gradients(Checkpointing.NONE)
    for ours, theirs in zip(gradients(checkpointing, every), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_kth_layer_is_checkpointed() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **FIELDS))
    checkpoint_layers(model, Checkpointing.SELECTIVE, every=3)
    assert [layer.gradient_checkpointing for layer in decoder_layers(model)] == [
        *(True, False, False, True)
    ]
