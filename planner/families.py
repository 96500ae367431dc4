"""The parameter tensors of every supported family, as transformers 5 names and shapes them.

Checked against the real modules on the meta device by tests/planner/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from planner.model import ModelSpec, ParameterShape

Shapes = list[tuple[str, tuple[int, ...]]]


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    weight: Shapes = [(f"{name}.weight", (rows, columns))]
    return [*weight, (f"{name}.bias", (rows,))] if bias else weight


def _split_attention(spec: ModelSpec) -> Shapes:
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    return [
        *_linear("self_attn.q_proj", query, hidden, spec.qkv_bias),
        *_linear("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        *_linear("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        *_linear("self_attn.o_proj", hidden, query, spec.attention_out_bias),
    ]


def _gated_mlp(spec: ModelSpec) -> Shapes:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [
        *_linear("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        *_linear("mlp.up_proj", inner, hidden, spec.mlp_bias),
        *_linear("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ]


def _norms(names: Sequence[str], width: int) -> Shapes:
    return [(f"{name}.weight", (width,)) for name in names]


_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


def _llama_layer(spec: ModelSpec) -> Shapes:
    return [*_split_attention(spec), *_gated_mlp(spec), *_norms(_PRE_NORMS, spec.hidden_size)]


def _qwen3_layer(spec: ModelSpec) -> Shapes:
    head_norms = _norms(("self_attn.q_norm", "self_attn.k_norm"), spec.head_dim)
    norms = _norms(_PRE_NORMS, spec.hidden_size)
    return [*_split_attention(spec), *head_norms, *_gated_mlp(spec), *norms]


def _olmo2_layer(spec: ModelSpec) -> Shapes:
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return [
        *_split_attention(spec),
        *_norms(("self_attn.q_norm",), spec.query_size),
        *_norms(("self_attn.k_norm",), spec.kv_size),
        *_gated_mlp(spec),
        *_norms(norms, spec.hidden_size),
    ]


def _gemma2_layer(spec: ModelSpec) -> Shapes:
    norms = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [*_split_attention(spec), *_gated_mlp(spec), *_norms(norms, spec.hidden_size)]


def _phi3_layer(spec: ModelSpec) -> Shapes:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [
        *_linear("self_attn.o_proj", hidden, spec.query_size),
        *_linear("self_attn.qkv_proj", spec.query_size + 2 * spec.kv_size, hidden),
        *_linear("mlp.gate_up_proj", 2 * inner, hidden),
        *_linear("mlp.down_proj", hidden, inner),
        *_norms(_PRE_NORMS, hidden),
    ]


def _mixtral_layer(spec: ModelSpec) -> Shapes:
    hidden, inner, experts = spec.hidden_size, spec.intermediate_size, spec.num_experts
    return [
        *_split_attention(spec),
        ("mlp.gate.weight", (experts, hidden)),
        ("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        ("mlp.experts.down_proj", (experts, hidden, inner)),
        *_norms(_PRE_NORMS, hidden),
    ]


def _layer_norm(name: str, width: int) -> Shapes:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _conv1d(name: str, inputs: int, outputs: int) -> Shapes:
    # transformers' Conv1D stores the transpose of a Linear weight.
    return [(f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))]


def _gpt2_layer(spec: ModelSpec) -> Shapes:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [
        *_layer_norm("ln_1", hidden),
        *_conv1d("attn.c_attn", hidden, 3 * hidden),
        *_conv1d("attn.c_proj", hidden, hidden),
        *_layer_norm("ln_2", hidden),
        *_conv1d("mlp.c_fc", hidden, inner),
        *_conv1d("mlp.c_proj", inner, hidden),
    ]


_LAYERS: dict[str, Callable[[ModelSpec], Shapes]] = {
    "llama": _llama_layer,
    "mistral": _llama_layer,
    "qwen2": _llama_layer,
    "qwen3": _qwen3_layer,
    "phi3": _phi3_layer,
    "olmo2": _olmo2_layer,
    "gemma2": _gemma2_layer,
    "gpt2": _gpt2_layer,
    "mixtral": _mixtral_layer,
}
SUPPORTED_FAMILIES: tuple[str, ...] = tuple(_LAYERS)


def _embedding_and_head(spec: ModelSpec) -> tuple[Shapes, Shapes]:
    hidden = spec.hidden_size
    if spec.family == "gpt2":
        tokens = [("transformer.wte.weight", (spec.vocab_size, hidden))]
        embedding: Shapes = [*tokens, ("transformer.wpe.weight", (spec.max_positions, hidden))]
        head = _layer_norm("transformer.ln_f", hidden)
    else:
        embedding = [("model.embed_tokens.weight", (spec.vocab_size, hidden))]
        head = [("model.norm.weight", (hidden,))]
    if not spec.tie_word_embeddings:
        head = [*head, ("lm_head.weight", (spec.vocab_size, hidden))]
    return embedding, head


@lru_cache(maxsize=256)
def parameter_shapes(spec: ModelSpec) -> tuple[ParameterShape, ...]:
    """Return every parameter tensor in the order of `named_parameters()`, tied weights once.

    Groups are "embedding" (input embedding modules), "layer" and "head" (final norm, untied head).
    """
    prefix = "transformer.h.0." if spec.family == "gpt2" else "model.layers.0."
    embedding, head = _embedding_and_head(spec)
    grouped = (
        ("embedding", embedding, 1),
        ("layer", [(prefix + n, s) for n, s in _LAYERS[spec.family](spec)], spec.num_layers),
        ("head", head, 1),
    )
    return tuple(
        ParameterShape(name=name, shape=shape, group=group, count=count)
        for group, shapes, count in grouped
        for name, shape in shapes
    )


def count_parameters(spec: ModelSpec) -> int:
    """Return the exact number of parameters, tied weights once."""
    return sum(shape.total_numel for shape in parameter_shapes(spec))
