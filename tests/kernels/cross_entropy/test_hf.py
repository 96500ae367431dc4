"""Hugging Face models with the fused loss: value and gradients are their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.jobs import losses
from runners.jobs.losses import install_fused_loss

SMALL = {
    "vocab_size": 71,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {"llama": SMALL, "gemma2": SMALL | {"final_logit_softcapping": 0.7}}


def loss_and_gradients(family: str, fused: bool, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(device).train()
    if fused:
        install_fused_loss(model)
    tokens = torch.randint(1, 71, (2, 19), generator=torch.Generator().manual_seed(5)).to(device)
    labels = tokens.clone()
    labels[0, 4:7] = -100
    loss: Any = model(input_ids=tokens, labels=labels, use_cache=False).loss
    (3 * loss).backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_hugging_face_s(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "chunk_tokens", lambda num_tokens, vocab_size: 16)
    expected, expected_gradients = loss_and_gradients(family, False, device)
    loss, gradients = loss_and_gradients(family, True, device)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=2e-5, atol=1e-6)
