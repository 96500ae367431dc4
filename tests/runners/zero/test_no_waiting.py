"""Within a step the host waits for nothing: torch raises where it would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where an operation makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(model: nn.Module, engine: ZeroEngine, tokens: torch.Tensor) -> None:
    """Run one step of two micro-batches."""
    for index in range(2):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / 2
        engine.backward(loss, last_micro_batch=index == 1)
    engine.step()


@pytest.mark.gpu
@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_waits_for_nothing_in_a_step(stage: int, syncs: bool) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **CONFIG), attn_implementation="sdpa"
    )
    engine = ZeroEngine(
        model.to(device).train(),
        stage=stage,
        optimizer="adamw_fused",
        precision="mixed",
        lr=1e-3,
        device=device,
        collectives=LocalCollectives(0, 4),
        sync_each_micro_batch=syncs,
        max_grad_norm=1.0,
    )
    tokens = torch.randint(0, 128, (2, 32), device=device)
    step(model, engine, tokens)
    with no_waiting():
        step(model, engine, tokens)
        with pytest.raises(RuntimeError, match="synchron"):
            tokens.sum().item()
