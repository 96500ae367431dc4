"""Flat groups: layout, padding, tied weights, and the start values of meta models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from runners.zero.groups import (
    Layout,
    Slot,
    decoder_layers,
    initialise_parameter,
    partition_parameters,
    storage_bytes,
)


def _tied_model() -> nn.Module:
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=6)
    return GPT2LMHeadModel(config)


def test_a_tied_head_belongs_to_the_embedding_group() -> None:
    groups = partition_parameters(_tied_model())
    assert [group.name for group in groups] == ["embedding", "layer.0", "layer.1", "head"]
    names = [[owner.name for owner in owners] for owners in groups[0].owners]
    assert names == [["transformer.wte.weight", "lm_head.weight"], ["transformer.wpe.weight"]]
    head = [owner.name for owners in groups[-1].owners for owner in owners]
    assert head == ["transformer.ln_f.weight", "transformer.ln_f.bias"]


def test_a_layout_pads_to_the_world_size_and_shards_evenly() -> None:
    slots = (Slot("a", torch.Size((3, 2)), 0), Slot("b", torch.Size((4,)), 6))
    layout = Layout(slots, world_size=4)
    assert (layout.numel, layout.shard_numel, layout.padded_numel) == (10, 3, 12)
    flat = torch.arange(12.0)
    assert layout.shard(flat, 3).tolist() == [9.0, 10.0, 11.0]
    assert layout.view(flat, 0).tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert layout.view(flat, 1).tolist() == [6.0, 7.0, 8.0, 9.0]


def test_a_group_may_be_smaller_than_the_world() -> None:
    layout = Layout((Slot("a", torch.Size((3,)), 0),), world_size=8)
    assert (layout.shard_numel, layout.padded_numel) == (1, 8)


def test_start_values_depend_on_name_and_seed_only() -> None:
    first, again, other = torch.empty(3, 40, 40)
    initialise_parameter(first, "w", 1)
    initialise_parameter(again, "w", 1)
    initialise_parameter(other, "v", 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.018 < first.std().item() < 0.022


def test_norms_start_at_one_and_biases_at_zero() -> None:
    weight, bias = torch.empty(2, 5)
    initialise_parameter(weight, "norm.weight", 0)
    initialise_parameter(bias, "norm.bias", 0)
    assert weight.tolist() == [1.0] * 5
    assert bias.tolist() == [0.0] * 5


def test_storage_bytes_counts_a_shared_storage_once() -> None:
    flat = torch.zeros(10)
    assert storage_bytes([flat, flat[2:4], None, torch.zeros(3, dtype=torch.bfloat16)]) == 46


def test_a_model_without_decoder_layers_is_refused() -> None:
    model = _tied_model()
    model.transformer = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no list of decoder layers"):
        decoder_layers(model)
