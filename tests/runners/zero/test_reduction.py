"""Clipping and the reduction's dtype, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

CPU = torch.device("cpu")
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
}
STEPS = 3


def _model(tied: bool = False) -> nn.Module:
    config = AutoConfig.for_model("llama", **CONFIG, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model: nn.Module = AutoModelForCausalLM.from_config(config).train()
    return model


def _loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _train(stage: int, model: nn.Module | None = None, **options: Any) -> dict[str, Tensor]:
    model = model or _model()
    chosen = {"optimizer": "adamw_foreach", "precision": "fp32", "lr": 1e-2} | options
    engine = ZeroEngine(model, stage=stage, device=CPU, **chosen)
    for step in range(STEPS):
        for half in range(2):
            engine.backward(_loss(model, 2 * step + half) / 2, last_micro_batch=half == 1)
        engine.step()
    return engine.full_parameters()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_is_torch_s_up_to_the_order_of_squares(stage: int, tied: bool) -> None:
    plain = _model(tied)
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=True)
    for step in range(STEPS):
        for half in range(2):
            (_loss(plain, 2 * step + half) / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norm > 0.6  # it does clip
        stepper.step()
        stepper.zero_grad()
    clipped = _train(stage, _model(tied), max_grad_norm=0.5)
    for name, values in plain.named_parameters():
        # AdamW divides by the root of squares: a factor close to one cancels but for rounding.
        assert torch.allclose(clipped[name], values, rtol=1e-5, atol=1e-6), name


def test_a_large_bound_clips_nothing() -> None:
    bounded, free = _train(2, max_grad_norm=1e6), _train(2)
    assert all(torch.equal(bounded[name], values) for name, values in free.items())


def test_frozen_parameters_do_not_count() -> None:
    model = _model()
    model.lm_head.weight.requires_grad_(False)
    plain = _model()
    plain.lm_head.weight.requires_grad_(False)
    trained = [p for p in plain.parameters() if p.requires_grad]
    stepper = torch.optim.AdamW(trained, lr=1e-2, foreach=True)
    for step in range(STEPS):
        for half in range(2):
            (_loss(plain, 2 * step + half) / 2).backward()
        nn.utils.clip_grad_norm_(trained, 0.1)
        stepper.step()
        stepper.zero_grad()
    clipped = _train(3, model, max_grad_norm=0.1)
    for name, values in plain.named_parameters():
        assert torch.allclose(clipped[name], values, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("precision", ["mixed", "bf16"])
@pytest.mark.parametrize("syncs", [False, True])
def test_stages_agree_when_reduced_in_fp32(precision: str, syncs: bool) -> None:
    options = {"precision": precision, "reduce_dtype": "fp32", "sync_each_micro_batch": syncs}
    stages = (0, 1, 2, 3) if not syncs else (2, 3)  # these two sum shards, the others whole
    base = _train(stages[0], **options)
    for stage in stages[1:]:
        found = _train(stage, **options)
        assert all(torch.equal(found[name], values) for name, values in base.items())


def test_mixed_keeps_what_was_reduced_in_fp32() -> None:
    model = _model()
    engine = ZeroEngine(
        model,
        stage=2,
        device=CPU,
        optimizer="sgd",
        precision="mixed",
        lr=0.1,
        reduce_dtype="fp32",
        collectives=LocalCollectives(0, 3),
    )
    engine.backward(_loss(model, 0), last_micro_batch=True)
    for group in engine.groups:
        assert group.gradient_shard is not None and group.gradient_shard.dtype is torch.float32
        # A third of a bf16 value is no bf16 value: the division was done in fp32.
        thirds = group.gradient_shard * 3
        assert torch.allclose(thirds, thirds.bfloat16().float(), rtol=1e-6)


def test_a_dtype_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_dtype 'bf16' is none for gradients in"):
        _train(2, reduce_dtype="bf16")
    with pytest.raises(ValueError, match="max_grad_norm is -1"):
        _train(2, max_grad_norm=-1.0)
