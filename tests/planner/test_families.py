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

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
VARIANTS = [
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
]


def built_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the module that the spec's hf_config builds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config))
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def planned_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Return the planner's names and shapes, layer after layer, in the order of the module."""
    shapes = parameter_shapes(spec)
    layers = [parameter for parameter in shapes if parameter.group == "layer"]
    named = [(p.name, p.shape) for p in shapes if p.group == "embedding"]
    for index in range(spec.num_layers):
        named += [(p.names()[index], p.shape) for p in layers]
    return named + [(p.name, p.shape) for p in shapes if p.group == "head"]


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
