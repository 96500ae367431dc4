"""The dimensions of a model and its parameter tensors."""

from __future__ import annotations

from planner.model import ParameterShape
from planner.presets import resolve_model


def test_a_layer_parameter_stands_for_one_tensor_per_layer() -> None:
    shape = ParameterShape(name="model.layers.1.mlp.w", shape=(3, 4), group="layer", layers=(1, 4))
    assert (shape.numel, shape.total_numel) == (12, 24)
    assert shape.names() == ["model.layers.1.mlp.w", "model.layers.4.mlp.w"]


def test_a_parameter_outside_the_layers_stands_for_itself() -> None:
    shape = ParameterShape(name="model.layers_norm.0.w", shape=(5,), group="head")
    assert (shape.count, shape.names()) == (1, ["model.layers_norm.0.w"])


def test_widths_follow_from_heads() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    assert (spec.query_size, spec.kv_size) == (32 * 128, 8 * 128)
    assert spec.num_sliding_layers == 0
    assert resolve_model("gemma-2-9b").num_sliding_layers == 21


def test_a_spec_can_key_a_cache() -> None:
    assert hash(resolve_model("gpt2")) == hash(resolve_model("openai-community/gpt2"))


def test_latent_attention_has_values_of_their_own_width() -> None:
    spec = resolve_model("deepseek-ai/DeepSeek-V3")
    assert spec.head_dim == 128 + 64
    assert (spec.query_size, spec.attended_size) == (128 * 192, 128 * 128)
    assert (spec.rotary_dim, spec.has_learned_positions) == (64, False)
    assert spec.expert_layers == (False,) * 3 + (True,) * 58
    assert spec.shared_expert_size == 2048


def test_positions_are_rotated_or_learned() -> None:
    assert resolve_model("facebook/opt-6.7b").position_rows == 2050
    assert resolve_model("gpt2").position_rows == 1024
    assert resolve_model("EleutherAI/pythia-1.4b").rotary_dim == 32
