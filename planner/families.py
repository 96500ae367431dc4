"""The parameter tensors of every supported family, as transformers 5 names and shapes them.

Checked against the real modules on the meta device by tests/planner/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from planner.model import ModelSpec, ParameterShape
from planner.rank import RankSpec
from planner.traced import parameters_of

Shapes = list[tuple[str, tuple[int, ...]]]


class _Part(NamedTuple):
    """Consecutive tensors of a decoder layer and the layers that have them."""

    shapes: Shapes
    layers: tuple[int, ...]


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    weight: Shapes = [(f"{name}.weight", (rows, columns))]
    return [*weight, (f"{name}.bias", (rows,))] if bias else weight


def _norms(names: Sequence[str], width: int) -> Shapes:
    return [(f"{name}.weight", (width,)) for name in names]


def _layer_norm(name: str, width: int) -> Shapes:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _conv1d(name: str, inputs: int, outputs: int) -> Shapes:
    # transformers' Conv1D stores the transpose of a Linear weight.
    return [(f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))]


def _split_attention(spec: ModelSpec) -> Shapes:
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    return [
        *_linear("self_attn.q_proj", query, hidden, spec.qkv_bias),
        *_linear("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        *_linear("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        *_linear("self_attn.o_proj", hidden, query, spec.attention_out_bias),
    ]


def _normed_attention(spec: ModelSpec) -> Shapes:
    norms = _norms(("self_attn.q_norm", "self_attn.k_norm"), spec.head_dim)
    return [*_split_attention(spec), *norms]


def _latent_attention(spec: ModelSpec) -> Shapes:
    latent, hidden, bias = spec.latent, spec.hidden_size, spec.qkv_bias
    assert latent is not None
    queries = _linear("self_attn.q_proj", spec.query_size, hidden)
    if latent.q_rank is not None:
        queries = [
            *_linear("self_attn.q_a_proj", latent.q_rank, hidden, bias),
            *_norms(("self_attn.q_a_layernorm",), latent.q_rank),
            *_linear("self_attn.q_b_proj", spec.query_size, latent.q_rank),
        ]
    keys_and_values = spec.num_heads * (latent.nope_dim + latent.value_dim)
    return [
        *queries,
        *_linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, hidden, bias),
        *_norms(("self_attn.kv_a_layernorm",), latent.kv_rank),
        *_linear("self_attn.kv_b_proj", keys_and_values, latent.kv_rank),
        *_linear("self_attn.o_proj", hidden, spec.attended_size, spec.attention_out_bias),
    ]


def _gated_mlp(spec: ModelSpec) -> Shapes:
    return _gated("mlp", spec.hidden_size, spec.intermediate_size, spec.mlp_bias)


def _gated(name: str, hidden: int, inner: int, bias: bool) -> Shapes:
    return [
        *_linear(f"{name}.gate_proj", inner, hidden, bias),
        *_linear(f"{name}.up_proj", inner, hidden, bias),
        *_linear(f"{name}.down_proj", hidden, inner, bias),
    ]


def _experts(spec: ModelSpec) -> Shapes:
    hidden, inner, experts = spec.hidden_size, spec.expert_size, spec.num_experts
    return [
        ("mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)),
        ("mlp.experts.down_proj", (experts, hidden, inner)),
    ]


def _routed_mlp(spec: ModelSpec) -> Shapes:
    return [*_experts(spec), ("mlp.gate.weight", (spec.num_experts, spec.hidden_size))]


def _shared_mlp(spec: ModelSpec) -> Shapes:
    shared = _gated("mlp.shared_experts", spec.hidden_size, spec.shared_expert_size, spec.mlp_bias)
    return [*_routed_mlp(spec), *shared]


_PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


def _every_layer(spec: ModelSpec, *shapes: Shapes) -> list[_Part]:
    tensors = [tensor for part in shapes for tensor in part]
    return [_Part(tensors, tuple(range(spec.num_layers)))]


def _dense_or_experts(
    spec: ModelSpec, attention: Shapes, experts: Callable[[ModelSpec], Shapes]
) -> list[_Part]:
    """A layer whose MLP is dense in some layers and a mixture of experts in the others."""
    routed = tuple(i for i, is_routed in enumerate(spec.expert_layers) if is_routed)
    dense = tuple(i for i, is_routed in enumerate(spec.expert_layers) if not is_routed)
    parts = [
        *_every_layer(spec, attention),
        _Part(_gated_mlp(spec), dense),
        _Part(experts(spec), routed),
        *_every_layer(spec, _norms(_PRE_NORMS, spec.hidden_size)),
    ]
    return [part for part in parts if part.layers]


def _llama_layer(spec: ModelSpec) -> list[_Part]:
    norms = _norms(_PRE_NORMS, spec.hidden_size)
    return _every_layer(spec, _split_attention(spec), _gated_mlp(spec), norms)


def _qwen3_layer(spec: ModelSpec) -> list[_Part]:
    norms = _norms(_PRE_NORMS, spec.hidden_size)
    return _every_layer(spec, _normed_attention(spec), _gated_mlp(spec), norms)


def _qwen3_moe_layer(spec: ModelSpec) -> list[_Part]:
    return _dense_or_experts(spec, _normed_attention(spec), _routed_mlp)


def _deepseek_layer(spec: ModelSpec) -> list[_Part]:
    return _dense_or_experts(spec, _latent_attention(spec), _shared_mlp)


def _olmo2_layer(spec: ModelSpec) -> list[_Part]:
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return _every_layer(
        spec,
        _split_attention(spec),
        _norms(("self_attn.q_norm",), spec.query_size),
        _norms(("self_attn.k_norm",), spec.kv_size),
        _gated_mlp(spec),
        _norms(norms, spec.hidden_size),
    )


_GEMMA_NORMS = (*_PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _gemma2_layer(spec: ModelSpec) -> list[_Part]:
    norms = _norms(_GEMMA_NORMS, spec.hidden_size)
    return _every_layer(spec, _split_attention(spec), _gated_mlp(spec), norms)


def _gemma3_layer(spec: ModelSpec) -> list[_Part]:
    norms = _norms(_GEMMA_NORMS, spec.hidden_size)
    return _every_layer(spec, _normed_attention(spec), _gated_mlp(spec), norms)


def _phi3_layer(spec: ModelSpec) -> list[_Part]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return _every_layer(
        spec,
        _linear("self_attn.o_proj", hidden, spec.query_size),
        _linear("self_attn.qkv_proj", spec.query_size + 2 * spec.kv_size, hidden),
        _linear("mlp.gate_up_proj", 2 * inner, hidden),
        _linear("mlp.down_proj", hidden, inner),
        _norms(_PRE_NORMS, hidden),
    )


def _mixtral_layer(spec: ModelSpec) -> list[_Part]:
    router: Shapes = [("mlp.gate.weight", (spec.num_experts, spec.hidden_size))]
    norms = _norms(_PRE_NORMS, spec.hidden_size)
    return _every_layer(spec, _split_attention(spec), router, _experts(spec), norms)


def _gpt_oss_layer(spec: ModelSpec) -> list[_Part]:
    hidden, inner, experts = spec.hidden_size, spec.expert_size, spec.num_experts
    mlp: Shapes = [
        ("mlp.router.weight", (experts, hidden)),
        ("mlp.router.bias", (experts,)),
        ("mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)),
        ("mlp.experts.gate_up_proj_bias", (experts, 2 * inner)),
        ("mlp.experts.down_proj", (experts, inner, hidden)),
        ("mlp.experts.down_proj_bias", (experts, hidden)),
    ]
    sinks: Shapes = [("self_attn.sinks", (spec.num_heads,))]
    return _every_layer(spec, sinks, _split_attention(spec), mlp, _norms(_PRE_NORMS, hidden))


def _gpt2_layer(spec: ModelSpec) -> list[_Part]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return _every_layer(
        spec,
        _layer_norm("ln_1", hidden),
        _conv1d("attn.c_attn", hidden, 3 * hidden),
        _conv1d("attn.c_proj", hidden, hidden),
        _layer_norm("ln_2", hidden),
        _conv1d("mlp.c_fc", hidden, inner),
        _conv1d("mlp.c_proj", inner, hidden),
    )


def _gpt_neox_layer(spec: ModelSpec) -> list[_Part]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return _every_layer(
        spec,
        _layer_norm("input_layernorm", hidden),
        _layer_norm("post_attention_layernorm", hidden),
        _linear("attention.query_key_value", 3 * hidden, hidden, spec.qkv_bias),
        _linear("attention.dense", hidden, hidden, spec.attention_out_bias),
        _linear("mlp.dense_h_to_4h", inner, hidden, spec.mlp_bias),
        _linear("mlp.dense_4h_to_h", hidden, inner, spec.mlp_bias),
    )


def _opt_layer(spec: ModelSpec) -> list[_Part]:
    hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    return _every_layer(
        spec,
        _linear("self_attn.k_proj", hidden, hidden, spec.qkv_bias),
        _linear("self_attn.v_proj", hidden, hidden, spec.qkv_bias),
        _linear("self_attn.q_proj", hidden, hidden, spec.qkv_bias),
        _linear("self_attn.out_proj", hidden, hidden, spec.attention_out_bias),
        _layer_norm("self_attn_layer_norm", hidden),
        _linear("fc1", inner, hidden, bias),
        _linear("fc2", hidden, inner, bias),
        _layer_norm("final_layer_norm", hidden),
    )


def _falcon_layer(spec: ModelSpec) -> list[_Part]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return _every_layer(
        spec,
        _linear("self_attention.query_key_value", spec.query_size + 2 * spec.kv_size, hidden),
        _linear("self_attention.dense", hidden, hidden),
        _linear("mlp.dense_h_to_4h", inner, hidden),
        _linear("mlp.dense_4h_to_h", hidden, inner),
        _layer_norm("input_layernorm", hidden),
    )


_LAYERS: dict[str, Callable[[ModelSpec], list[_Part]]] = {
    "llama": _llama_layer,
    "mistral": _llama_layer,
    "qwen2": _llama_layer,
    "qwen3": _qwen3_layer,
    "phi3": _phi3_layer,
    "olmo2": _olmo2_layer,
    "gemma2": _gemma2_layer,
    "gemma3_text": _gemma3_layer,
    "gpt2": _gpt2_layer,
    "gpt_neox": _gpt_neox_layer,
    "opt": _opt_layer,
    "falcon": _falcon_layer,
    "mixtral": _mixtral_layer,
    "qwen3_moe": _qwen3_moe_layer,
    "gpt_oss": _gpt_oss_layer,
    "deepseek_v2": _deepseek_layer,
    "deepseek_v3": _deepseek_layer,
}
SUPPORTED_FAMILIES: tuple[str, ...] = tuple(_LAYERS)


class _Ends(NamedTuple):
    """How a family names what is not a decoder layer, and its list of layers."""

    layers: str = "model.layers"
    tokens: str = "model.embed_tokens"
    positions: str | None = None
    norm: str = "model.norm"
    norm_has_bias: bool = False


_ENDS: dict[str, _Ends] = {
    "gpt2": _Ends("transformer.h", "transformer.wte", "transformer.wpe", "transformer.ln_f", True),
    "gpt_neox": _Ends(
        "gpt_neox.layers", "gpt_neox.embed_in", None, "gpt_neox.final_layer_norm", True
    ),
    "opt": _Ends(
        "model.decoder.layers",
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.final_layer_norm",
        True,
    ),
    "falcon": _Ends("transformer.h", "transformer.word_embeddings", None, "transformer.ln_f", True),
}


def _embedding_and_head(spec: ModelSpec, ends: _Ends) -> tuple[Shapes, Shapes]:
    hidden = spec.hidden_size
    embedding: Shapes = [(f"{ends.tokens}.weight", (spec.vocab_size, hidden))]
    if ends.positions is not None:
        embedding.append((f"{ends.positions}.weight", (spec.position_rows, hidden)))
    norm = _layer_norm(ends.norm, hidden) if ends.norm_has_bias else _norms((ends.norm,), hidden)
    untied = not spec.tie_word_embeddings
    head: Shapes = [("lm_head.weight", (spec.vocab_size, hidden))] if untied else []
    return embedding, [*norm, *head]


@lru_cache(maxsize=256)
def parameter_shapes(spec: ModelSpec) -> tuple[ParameterShape, ...]:
    """Return every parameter tensor, layer tensors in the order of `named_parameters()`.

    Tied weights are listed once. Groups are "embedding" (input embedding modules), "layer" and
    "head" (final norm, untied head).
    """
    if spec.trace is not None:
        return parameters_of(spec)
    ends = _ENDS.get(spec.family, _Ends())
    embedding, head = _embedding_and_head(spec, ends)
    shapes = (
        *_outer("embedding", embedding),
        *(
            ParameterShape(
                name=f"{ends.layers}.{part.layers[0]}.{name}",
                shape=shape,
                group="layer",
                layers=part.layers,
            )
            for part in _LAYERS[spec.family](spec)
            for name, shape in part.shapes
        ),
        *_outer("head", head),
    )
    return spec.held(shapes) if isinstance(spec, RankSpec) else shapes


def _outer(group: str, shapes: Shapes) -> list[ParameterShape]:
    return [ParameterShape(name=name, shape=shape, group=group) for name, shape in shapes]


def count_parameters(spec: ModelSpec) -> int:
    """Return the exact number of parameters, tied weights once."""
    return sum(shape.total_numel for shape in parameter_shapes(spec))
