"""Adapters and frozen layers: what is trained, and that engines train it as plain torch does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from planner.workload import BaseDtype, LoraTargets, TrainingWorkload
from runners.engines.fsdp2 import Fsdp2Engine
from runners.jobs.adapters import choose_trained
from runners.zero.collectives import LocalCollectives, ProcessGroupCollectives
from runners.zero.engine import ZeroEngine

CPU = torch.device("cpu")
LORA = TrainingWorkload(lora_rank=3, lora_targets=LoraTargets.QV)
FROZEN = TrainingWorkload(frozen_layers=1)
# Elements: q_proj 16x16, k and v 8x16, o 16x16, three MLP matrices of 20x16, two norms.
LAYER = 2 * 256 + 2 * 128 + 3 * 320 + 2 * 16
EMBEDDING, HEAD = 31 * 16, 31 * 16 + 16
# A and B of q_proj, then of v_proj.
ADAPTERS = 3 * 16 + 16 * 3 + 3 * 16 + 8 * 3


def _model(tied: bool = False) -> nn.Module:
    torch.manual_seed(2)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=31,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def _chosen(workload: TrainingWorkload, checkpointing: bool = False, tied: bool = False) -> Any:
    model = _model(tied)
    choose_trained(model, workload)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _tokens(step: int) -> Tensor:
    return torch.randint(1, 31, (2, 7), generator=torch.Generator().manual_seed(step))


def _train_plainly(model: nn.Module) -> dict[str, Tensor]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=True)
    for step in range(3):
        loss = model(input_ids=_tokens(step), labels=_tokens(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _train(engine: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    for step in range(3):
        loss = engine.module(input_ids=_tokens(step), labels=_tokens(step), use_cache=False).loss
        engine.backward(loss, last_micro_batch=True)
        state = engine.state_bytes()
        engine.step()
    return engine.full_parameters(), state


OPTIONS = {"optimizer": "adamw_foreach", "precision": "fp32", "lr": 1e-2, "device": CPU}


def _assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert torch.equal(values, right[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("workload", [LORA, FROZEN], ids=["lora", "frozen"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_our_engine_trains_what_is_chosen_bit_by_bit(
    stage: int, workload: TrainingWorkload, checkpointing: bool
) -> None:
    before = {n: p.detach().clone() for n, p in _chosen(workload).named_parameters()}
    expected = _train_plainly(_chosen(workload))
    parameters, _ = _train(ZeroEngine(_chosen(workload, checkpointing), stage=stage, **OPTIONS))
    _assert_same(parameters, expected)
    moved = {name for name, values in parameters.items() if not torch.equal(values, before[name])}
    assert moved == {n for n, p in _chosen(workload).named_parameters() if p.requires_grad}


def test_a_tied_head_is_frozen_with_its_embedding() -> None:
    expected = _train_plainly(_chosen(FROZEN, tied=True))
    parameters, _ = _train(ZeroEngine(_chosen(FROZEN, tied=True), stage=3, **OPTIONS))
    _assert_same(parameters, expected)


def _ceil(numel: int, ranks: int) -> int:
    return -(-numel // ranks)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_are_sharded_and_have_no_gradients(stage: int) -> None:
    ranks = 4
    lone_rank = LocalCollectives(rank=0, world_size=ranks)
    _, state = _train(ZeroEngine(_chosen(LORA), stage=stage, collectives=lone_rank, **OPTIONS))
    # At stage 1 what is frozen stays whole; trained parameters are shards behind the backward.
    kept = 1 if stage == 3 else ranks
    frozen = sum(_ceil(numel, ranks) for numel in (EMBEDDING, LAYER, LAYER, HEAD))
    assert state["parameter_bytes"] == 4 * (kept * frozen + 2 * _ceil(ADAPTERS, ranks))
    gradients = ADAPTERS if stage == 1 else _ceil(ADAPTERS, ranks)
    assert state["gradient_bytes"] == 4 * 2 * gradients
    # Two moments of the shard and a step counter per group.
    assert state["optimizer_bytes"] == 2 * (8 * _ceil(ADAPTERS, ranks) + 4)


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("workload", [LORA, FROZEN], ids=["lora", "frozen"])
def test_fsdp2_trains_what_is_chosen(workload: TrainingWorkload) -> None:
    expected = _train_plainly(_chosen(workload))
    collectives = ProcessGroupCollectives()
    engine = Fsdp2Engine(_chosen(workload), stage=3, collectives=collectives, **OPTIONS)
    parameters, state = _train(engine)
    _assert_same(parameters, expected)
    trained = 2 * ADAPTERS if workload is LORA else LAYER + HEAD
    assert state["gradient_bytes"] == 4 * trained


def test_adapters_start_as_nothing_on_a_model_without_values() -> None:
    with torch.device("meta"):
        model = _model()
        choose_trained(model, LORA)
    engine = ZeroEngine(model, stage=3, **OPTIONS)
    values = engine.full_parameters()
    assert all(not v.any() for n, v in values.items() if "lora_B" in n)
    assert all(v.any() for n, v in values.items() if "lora_A" in n)


def test_what_cannot_run_is_said() -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(ValueError, match=r"needs bitsandbytes: pip install 'peakmark"):
            choose_trained(_model(), TrainingWorkload(lora_rank=3, base_dtype=BaseDtype.NF4))
    with pytest.raises(ValueError, match="leave none of the model to train"):
        choose_trained(_model(), TrainingWorkload(frozen_layers=2))
