"""The dimensions of a model and its parameter tensors."""

from __future__ import annotations

from planner.model import ParameterShape
from planner.presets import resolve_model


def test_a_layer_parameter_stands_for_one_tensor_per_layer() -> None:
    shape = ParameterShape(name="model.layers.0.mlp.w", shape=(3, 4), group="layer", count=2)
    assert (shape.numel, shape.total_numel) == (12, 24)
    assert shape.names() == ["model.layers.0.mlp.w", "model.layers.1.mlp.w"]


def test_widths_follow_from_heads() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    assert (spec.query_size, spec.kv_size) == (32 * 128, 8 * 128)
    assert spec.num_sliding_layers == 0
    assert resolve_model("gemma-2-9b").num_sliding_layers == 21


def test_a_spec_can_key_a_cache() -> None:
    assert hash(resolve_model("gpt2")) == hash(resolve_model("openai-community/gpt2"))
