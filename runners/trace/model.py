"""Build a small real model whose every dimension is a recognisable prime, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.memory.kinds import MOE
from planner.workload import Checkpointing, LoraTargets, TrainingWorkload
from runners.jobs.adapters import choose_trained
from runners.jobs.checkpointing import checkpoint_layers
from runners.jobs.losses import install_chunked_loss
from runners.trace.losses import install_fused_loss
from runners.trace.nf4 import mark_adapted, store_in_four_bits
from runners.trace.patterns import Pattern, pattern_fields, prepare_layers, traits
from runners.trace.symbols import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_RANK,
    NOPE_DIM,
    PRIMES,
    ROTARY_DIM,
)
from runners.trace.variants import Variant

# These derive the head size from the hidden size, so their hidden size is heads * head_dim.
DERIVED_HEAD_DIM = ("phi3", "olmo2", "gpt_neox", "opt")


def _dense_fields(variant: Variant) -> dict[str, Any]:
    family = variant.family
    fields: dict[str, Any] = {
        "vocab_size": PRIMES["vocab"],
        "hidden_size": HEADS * HEAD_DIM if family in DERIVED_HEAD_DIM else HIDDEN,
        "intermediate_size": PRIMES["ffn"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if "_mha" in variant.attention else PRIMES["kv_heads"],
        "max_position_embeddings": 2 * PRIMES["seq"],
        "pad_token_id": 0,
    }
    if family not in DERIVED_HEAD_DIM:
        fields["head_dim"] = HEAD_DIM
    if family in ("gpt_neox", "opt", "falcon", "deepseek_v2", "deepseek_v3"):
        for key in ("num_key_value_heads", "head_dim"):
            fields.pop(key, None)
    return fields


def _one_key_value_head() -> dict[str, Any]:
    """The fields of a model whose group of query heads is all of them."""
    return {"num_attention_heads": PRIMES["group"], "num_key_value_heads": 1}


def _own_fields(variant: Variant) -> dict[str, Any]:
    """The fields that only this family has, or has by other names than Llama's."""
    experts = {
        "num_local_experts": PRIMES["experts"],
        "num_experts_per_tok": PRIMES["top_k"],
    }
    own: dict[str, dict[str, Any]] = {
        "gpt2": {
            "n_embd": HEADS * HEAD_DIM,
            "n_head": HEADS,
            "n_inner": PRIMES["ffn"],
            "n_positions": PRIMES["positions"],
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
        # Rounded down to the elements of a head that are rotated.
        "gpt_neox": {"rotary_pct": (ROTARY_DIM + 0.5) / HEAD_DIM},
        "opt": {
            "ffn_dim": PRIMES["ffn"],
            "max_position_embeddings": PRIMES["positions"] - 2,
            "dropout": 0.0,
        },
        # One key-value head for all query heads: the group is all of them.
        "falcon": {
            "hidden_size": PRIMES["group"] * HEAD_DIM,
            "num_attention_heads": PRIMES["group"],
            "ffn_hidden_size": PRIMES["ffn"],
        },
        "mixtral": experts,
        "qwen3_moe": {
            "num_experts": PRIMES["experts"],
            "num_experts_per_tok": PRIMES["top_k"],
            "moe_intermediate_size": PRIMES["moe_ffn"],
            "norm_topk_prob": True,
        },
        "gpt_oss": experts,
        "deepseek_v2": {"n_routed_experts": PRIMES["experts"], **_latent_fields(variant)},
        "deepseek_v3": {
            "n_routed_experts": PRIMES["expert_groups"] * PRIMES["group_experts"],
            "n_group": PRIMES["expert_groups"],
            "topk_group": PRIMES["chosen_groups"],
            **_latent_fields(variant),
        },
    }
    return own.get(variant.family, {})


def _latent_fields(variant: Variant) -> dict[str, Any]:
    """The fields of latent attention and of experts beside shared ones."""
    return {
        "num_key_value_heads": HEADS,
        "q_lora_rank": None if "_direct" in variant.attention else PRIMES["q_rank"],
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE_DIM,
        "qk_rope_head_dim": ROTARY_DIM,
        "v_head_dim": PRIMES["value_dim"],
        "moe_intermediate_size": PRIMES["moe_ffn"],
        "num_experts_per_tok": PRIMES["top_k"],
        "n_shared_experts": PRIMES["shared_experts"],
    }


def config_fields(variant: Variant, pattern: Pattern) -> dict[str, Any]:
    """The Hugging Face config fields of the traced model."""
    fields = {} if variant.family == "gpt2" else _dense_fields(variant)
    fields |= _own_fields(variant)
    if "_mqa" in variant.attention:
        fields |= _one_key_value_head()
    fields |= {"vocab_size": PRIMES["vocab"], "tie_word_embeddings": False}
    if variant.family == "mistral":
        fields["sliding_window"] = None
    if variant.family in ("gemma2", "gemma3_text", "gpt_oss"):
        fields["layer_types"] = ["full_attention"] * len(pattern)
    return fields | pattern_fields(pattern) | _dense_layer_fields(variant, pattern)


def _dense_layer_fields(variant: Variant, pattern: Pattern) -> dict[str, Any]:
    """The fields that say which layers have a dense MLP, in families where not all have experts."""
    dense = [layer for layer, kind in enumerate(pattern) if MOE not in traits(kind)]
    if variant.family == "qwen3_moe":
        return {"mlp_only_layers": dense}
    return {"first_k_dense_replace": len(dense)} if "deepseek" in variant.family else {}


def build_model(variant: Variant, pattern: Pattern) -> torch.nn.Module:
    """The real Hugging Face model of this variant on the meta device, in training mode."""
    config = AutoConfig.for_model(variant.family, **config_fields(variant, pattern))
    dtype = torch.bfloat16 if variant.compute == "bf16" else torch.float32
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=variant.implementation, dtype=dtype
        )
        if variant.base:
            store_in_four_bits(model)
        if variant.adapters:
            targets = LoraTargets(variant.adapters)
            chosen = TrainingWorkload(lora_rank=PRIMES["lora_rank"], lora_targets=targets)
            choose_trained(model, chosen)
            mark_adapted(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # engines store all in one dtype, routers too
    checkpoint_layers(model, Checkpointing(variant.checkpointing))
    prepare_layers(model, pattern)
    if variant.loss == "chunked":
        install_chunked_loss(model)
    elif variant.loss == "fused_linear":
        install_fused_loss(model)
    return model.train()
