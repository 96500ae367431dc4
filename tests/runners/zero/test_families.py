"""One training step of every supported family: the engine against plain torch, and from meta."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.families import SUPPORTED_FAMILIES
from runners.zero.engine import ZeroEngine
from runners.zero.groups import decoder_layers

LR = 1e-3
LAYERS = 2
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
LATENT = {
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 32},
    "gpt_neox": COMMON,
    "opt": COMMON,
    "falcon": COMMON,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen3_moe": {
        **GROUPED,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "gemma3_text": {**GROUPED, "sliding_window": 8, "sliding_window_pattern": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
}
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


def build(family: str, device: str) -> nn.Module:
    """Return a small model of the family with eager attention, as the job builds it."""
    config = {"model_type": family, **CONFIGS.get(family, GROUPED)}
    hf_config = spec_from_config(config, name=family).hf_config
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**hf_config), attn_implementation="eager", dtype=torch.float32
        )
    return model.train()


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return the loss of one batch."""
    loss: torch.Tensor = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return loss


def engine_of(model: nn.Module, stage: int, precision: str) -> ZeroEngine:
    """Return the engine on the CPU, alone."""
    options: dict[str, Any] = {"optimizer": "adamw_foreach", "precision": precision, "lr": LR}
    return ZeroEngine(model, stage=stage, device=torch.device("cpu"), **options)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_one_step_equals_plain_torch(family: str, stage: int) -> None:
    model = build(family, "cpu")
    plain = copy.deepcopy(model)
    loss_of(plain).backward()
    torch.optim.AdamW(plain.parameters(), lr=LR, foreach=True).step()
    engine = engine_of(model, stage, "fp32")
    engine.backward(loss_of(model), last_micro_batch=True)
    engine.step()
    stepped = engine.full_parameters()
    for name, parameter in plain.named_parameters():
        assert torch.equal(stepped[name], parameter), name


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_a_model_on_the_meta_device_trains_in_mixed_precision(family: str) -> None:
    model = build(family, "meta")
    engine = engine_of(model, 3, "mixed")
    losses = []
    for _ in range(3):
        loss = loss_of(model)
        engine.backward(loss, last_micro_batch=True)
        engine.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(decoder_layers(model)) == LAYERS
