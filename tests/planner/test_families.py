"""Parameter tensors against the modules that transformers really builds, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.families import SUPPORTED_FAMILIES, count_parameters, parameter_shapes
from planner.model import ModelSpec
from planner.presets import model_presets, resolve_model
from runners.zero.groups import partition_parameters

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
NO_GROUPS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
LATENT = {
    **NO_GROUPS,
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 3,
}
VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", **SMALL, "tie_word_embeddings": True, "head_dim": 32},
    {"model_type": "mistral", **SMALL, "head_dim": 48, "sliding_window": 64},
    {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "max_window_layers": 1},
    {"model_type": "qwen2", **SMALL, "head_dim": 64},
    {"model_type": "qwen3", **SMALL, "attention_bias": True},
    {"model_type": "phi3", **SMALL, "tie_word_embeddings": True},
    {"model_type": "olmo2", **SMALL, "attention_bias": True},
    {"model_type": "gemma2", **SMALL, "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "mixtral", **SMALL, "num_local_experts": 5, "head_dim": 20},
    {
        "model_type": "gpt2",
        "vocab_size": 1000,
        "n_embd": 96,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 100,
        "n_positions": 50,
        "tie_word_embeddings": False,
    },
    {"model_type": "gemma3_text", **SMALL, "attention_bias": True},
    {"model_type": "gemma3_text", **SMALL, "tie_word_embeddings": False, "head_dim": 32},
    {"model_type": "gpt_neox", **NO_GROUPS, "attention_bias": False},
    {"model_type": "gpt_neox", **NO_GROUPS, "tie_word_embeddings": True},
    {"model_type": "opt", **NO_GROUPS, "max_position_embeddings": 50},
    {"model_type": "opt", **NO_GROUPS, "tie_word_embeddings": False, "ffn_dim": 100},
    {"model_type": "falcon", **NO_GROUPS},
    {"model_type": "falcon", **NO_GROUPS, "ffn_hidden_size": 100, "tie_word_embeddings": False},
    {"model_type": "qwen3_moe", **SMALL, "num_experts": 9, "moe_intermediate_size": 24},
    {
        "model_type": "qwen3_moe",
        **SMALL,
        "num_experts": 8,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
    },
    {"model_type": "gpt_oss", **SMALL, "num_local_experts": 4, "attention_bias": False},
    {"model_type": "deepseek_v2", **LATENT, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    {"model_type": "deepseek_v2", **LATENT, "num_experts_per_tok": 2, "q_lora_rank": None},
    {"model_type": "deepseek_v2", **LATENT, "num_experts_per_tok": 2, "mlp_bias": True},
    {"model_type": "deepseek_v3", **LATENT, "attention_bias": True, "first_k_dense_replace": 2},
]


Groups = dict[str, list[tuple[str, tuple[int, ...]]]]


def built_shapes(spec: ModelSpec) -> Groups:
    """Return the names and shapes of the module that the spec's hf_config builds, as we group."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {
        group.name: [(owners[0].name, shapes[owners[0].name]) for owners in group.owners]
        for group in partition_parameters(model)
    }


def planned_shapes(spec: ModelSpec) -> Groups:
    """Return the planner's names and shapes by group, each in the order of the module."""
    names = ["embedding", *(f"layer.{i}" for i in range(spec.num_layers)), "head"]
    groups: Groups = {name: [] for name in names}
    for parameter in parameter_shapes(spec):
        if parameter.layers:
            for layer, name in zip(parameter.layers, parameter.names(), strict=True):
                groups[f"layer.{layer}"].append((name, parameter.shape))
        else:
            groups[parameter.group].append((parameter.name, parameter.shape))
    return groups


@pytest.mark.parametrize("preset", model_presets(), ids=lambda preset: preset.id)
def test_total_equals_the_count_that_transformers_gave(preset: Any) -> None:
    spec = resolve_model(preset.id)
    assert spec.parameters == count_parameters(spec) == preset.checked_params


@pytest.mark.parametrize("preset_id", [preset.id for preset in model_presets()])
def test_two_layers_of_a_preset_have_the_module_s_parameters(preset_id: str) -> None:
    spec = resolve_model(preset_id, {_depth_key(preset_id): 2})
    assert planned_shapes(spec) == built_shapes(spec)


def _depth_key(preset_id: str) -> str:
    return "n_layer" if "gpt2" in preset_id else "num_hidden_layers"


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: "-".join(map(str, c.values())))
def test_variants_of_a_family_have_the_module_s_parameters(config: dict[str, Any]) -> None:
    spec = spec_from_config(config, name="variant")
    assert planned_shapes(spec) == built_shapes(spec)


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: "-".join(map(str, c.values())))
def test_the_built_configuration_agrees_on_windows(config: dict[str, Any]) -> None:
    spec = spec_from_config(config, name="variant")
    built = AutoConfig.for_model(**spec.hf_config)
    kinds = getattr(built, "layer_types", None)
    if kinds is not None:
        expected = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        expected = (getattr(built, "sliding_window", None) is not None,) * spec.num_layers
    assert spec.sliding_layers == expected


def test_every_family_has_a_variant() -> None:
    assert {config["model_type"] for config in VARIANTS} == set(SUPPORTED_FAMILIES)
