"""The chunked loss against Hugging Face's own, value and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from planner.memory.losses import chunk_tokens
from runners.jobs import losses
from runners.jobs.losses import install_chunked_loss

SMALL = {
    "vocab_size": 71,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 71, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64}
DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
FAMILIES = {
    "llama": SMALL,
    "gemma2": SMALL | {"final_logit_softcapping": 0.7},
    "mixtral": SMALL | {"num_local_experts": 2},
    "gpt2": GPT2 | DROPOUT | {"bos_token_id": 0, "eos_token_id": 0},
}


def _model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    return model.train()


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 71, (2, 19), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[0, 4:7] = -100
    return tokens, labels


def _loss_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = _batch()
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    (3 * loss).backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def chunks_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """38 tokens in chunks of five: the last one has three."""
    monkeypatch.setattr(losses, "chunk_tokens", lambda num_tokens, vocab_size: 5)


@pytest.mark.usefixtures("chunks_of_five")
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_hugging_face_s(family: str) -> None:
    """In float64 both are exact but for rounding, except the softmax, which both take in fp32."""
    expected, expected_gradients = _loss_and_gradients(_model(family))
    model = _model(family)
    install_chunked_loss(model)
    loss, gradients = _loss_and_gradients(model)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-7)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("chunks_of_five")
def test_bf16_and_autocast_stay_within_their_rounding() -> None:
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        results = []
        for chunked in (False, True):
            model = _model("gemma2", dtype)
            if chunked:
                install_chunked_loss(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                results.append(_loss_and_gradients(model))
        (expected, expected_gradients), (loss, gradients) = results
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in gradients.items():
            assert gradient.dtype is expected_gradients[name].dtype
            error = (gradient - expected_gradients[name]).float().norm()
            assert error <= 0.02 * expected_gradients[name].float().norm(), name


@pytest.mark.usefixtures("chunks_of_five")
def test_a_frozen_head_gets_no_gradient() -> None:
    model: Any = _model("llama")
    model.lm_head.weight.requires_grad_(False)
    install_chunked_loss(model)
    _, gradients = _loss_and_gradients(model)
    assert "lm_head.weight" not in gradients
    assert "model.norm.weight" in gradients


def test_a_head_with_a_scale_is_refused() -> None:
    model: Any = _model("llama")
    model.config.logits_scaling = 8.0
    with pytest.raises(ValueError, match="knows no head with logits_scaling"):
        install_chunked_loss(model)


def test_chunks_hold_2_to_26_logits_at_most() -> None:
    # Llama 3: 2^26 / 128,256 = 523 tokens, of which a multiple of 64 is 512.
    assert chunk_tokens(16_384, 128_256) == 512
    assert chunk_tokens(100, 128_256) == 100
    assert chunk_tokens(16_384, 32_000) == 2_048
    # A vocabulary of two million still gets 64 tokens.
    assert chunk_tokens(16_384, 2_000_000) == 64
