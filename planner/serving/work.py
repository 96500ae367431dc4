"""What one forward of a served model runs on one GPU: its products, its small kernels, its cache.

The kernels are those of an engine that computes a norm, the rotary embedding and a gated activation by
one kernel each, query, key and value by one product, and gate and up by one: `runners/serving` does.
What surrounds a mixture's experts and latent attention runs as transformers writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.families import parameter_shapes
from planner.model import ModelSpec
from planner.serving.memory import quantised_bytes
from planner.workload import WeightsDtype

_PLAIN_BYTES = {WeightsDtype.BF16: 2, WeightsDtype.FP16: 2, WeightsDtype.FP32: 4}
# Kernels between a router's product and the sum over a token's experts: 21 in the traced list of
# Qwen3-MoE's layer (planner/speed/operations.json), two that prepare grouped products, and one more for
# each of three sorts.
_ROUTING_KERNELS = 26
# Elements read and written besides the products, per expert that a token visits: rows gathered, weighted,
# put back and summed; the activation and its product with the up projection (same list).
_ROUTING_PASSES_HIDDEN, _ROUTING_PASSES_EXPERT = 6, 5
# DeepSeek's queries and keys are rotated, joined and copied by ten kernels (list of deepseek_v2).
_LATENT_KERNELS = 10
# Around the layers: angles, positions, the embedding's rows, and what picks and keeps the next token.
STEP_KERNELS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product [tokens, inner] x [inner, columns], run `count` times; of a mixture one expert's.

    `weight_bytes` is what one such weight takes as it is stored.
    """

    name: str
    inner: int
    columns: int
    count: int
    weight_bytes: float
    experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Small kernels bound by memory: `kernels` of them together move `token_bytes` for each token."""

    name: str
    token_bytes: float
    kernels: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """Everything of a forward but attention over the cache; `head` runs for chosen tokens only."""

    products: tuple[Product, ...]
    streams: tuple[Stream, ...]
    head: Product
    element_bytes: int

    @property
    def kernels(self) -> int:
        """Kernels of a forward, attention's among them; a grouped product counts once."""
        products = sum(one.count for one in self.products)
        return products + sum(one.kernels * one.count for one in self.streams) + 1 + STEP_KERNELS


def forward_work(part: ModelSpec, weights_dtype: WeightsDtype) -> ForwardWork:
    """Return the work of the part of a model that one GPU holds."""
    element_bytes = 4 if weights_dtype is WeightsDtype.FP32 else 2
    return ForwardWork(
        products=(*_attention_products(part, weights_dtype), *_mlp_products(part, weights_dtype)),
        streams=(
            *_norms(part, element_bytes),
            *_around_attention(part, element_bytes),
            *_around_mlp(part, element_bytes),
        ),
        head=Product(
            name="head",
            inner=part.hidden_size,
            columns=part.vocab_size,
            count=1,
            weight_bytes=float(part.hidden_size * part.vocab_size * element_bytes),
        ),
        element_bytes=element_bytes,
    )


def _product(
    name: str, sizes: tuple[int, int], count: int, dtype: WeightsDtype, experts: int = 0
) -> Product:
    inner, columns = sizes
    is_plain = dtype in _PLAIN_BYTES or (dtype is WeightsDtype.MXFP4 and not experts)
    if is_plain:
        stored = inner * columns * _PLAIN_BYTES.get(dtype, 2)
    else:
        stored = quantised_bytes(inner * columns, inner, columns, dtype)
    return Product(
        name=name,
        inner=inner,
        columns=columns,
        count=count,
        weight_bytes=float(stored),
        experts=experts,
    )


def _attention_products(part: ModelSpec, dtype: WeightsDtype) -> Iterator[Product]:
    hidden, count = part.hidden_size, part.num_layers
    output = (part.attended_size, hidden)
    if part.latent is None:
        yield _product("qkv", (hidden, part.query_size + 2 * part.kv_size), count, dtype)
        yield _product("attention_output", output, count, dtype)
        return
    latent = part.latent
    if latent.q_rank is None:
        yield _product("query", (hidden, part.query_size), count, dtype)
    else:
        yield _product("query_down", (hidden, latent.q_rank), count, dtype)
        yield _product("query_up", (latent.q_rank, part.query_size), count, dtype)
    yield _product("latent_down", (hidden, latent.kv_rank + latent.rope_dim), count, dtype)
    # Where latents are cached, the same weight is applied to the queries and to the output instead.
    up = part.num_heads * (latent.nope_dim + latent.value_dim)
    yield _product("latent_up", (latent.kv_rank, up), count, dtype)
    yield _product("attention_output", output, count, dtype)


def _mlp_products(part: ModelSpec, dtype: WeightsDtype) -> Iterator[Product]:
    hidden, routed = part.hidden_size, part.num_expert_layers
    joined = part.mlp_products - 1
    if dense := part.num_layers - routed:
        width = part.intermediate_size
        yield _product("mlp_up", (hidden, joined * width), dense, dtype)
        yield _product("mlp_down", (width, hidden), dense, dtype)
    if not routed:
        return
    yield _product("router", (hidden, part.num_experts), routed, WeightsDtype.BF16)
    width, experts = part.expert_size, part.num_experts
    yield _product("experts_up", (hidden, joined * width), routed, dtype, experts)
    yield _product("experts_down", (width, hidden), routed, dtype, experts)
    if width := part.shared_expert_size:
        yield _product("shared_up", (hidden, joined * width), routed, dtype)
        yield _product("shared_down", (width, hidden), routed, dtype)


def _norms(part: ModelSpec, element_bytes: int) -> Iterator[Stream]:
    for parameter in parameter_shapes(part):
        name = parameter.name
        is_norm = len(parameter.shape) == 1 and ("norm" in name or ".ln_" in name)
        if parameter.group != "layer" or not is_norm or not name.endswith("weight"):
            continue
        width = parameter.numel
        if width == part.head_dim and "q_norm" in name:
            width = part.query_size
        elif width == part.head_dim and "k_norm" in name:
            width = part.kv_size
        moved = float(2 * width * element_bytes)
        yield Stream(name="norms", token_bytes=moved, kernels=1, count=parameter.count)


def _around_attention(part: ModelSpec, element_bytes: int) -> Iterator[Stream]:
    """Rotary embedding, what latent attention copies, the two residual sums."""
    count, latent = part.num_layers, part.latent
    width = 2 * (part.query_size + part.kv_size)
    kernels = 1 if part.rotary_dim else 0
    if latent is not None:
        heads = part.num_heads
        joined = heads * (2 * latent.nope_dim + 7 * latent.rope_dim + 2 * latent.value_dim)
        width, kernels = 2 * part.query_size + joined, _LATENT_KERNELS
    if kernels:
        moved = float(width * element_bytes)
        yield Stream(name="rotary", token_bytes=moved, kernels=kernels, count=count)
    sums = float(6 * part.hidden_size * element_bytes)
    yield Stream(name="residuals", token_bytes=sums, kernels=2, count=count)


def _around_mlp(part: ModelSpec, element_bytes: int) -> Iterator[Stream]:
    hidden, routed = part.hidden_size, part.num_expert_layers
    passes = part.mlp_products
    if dense := part.num_layers - routed:
        moved = float(passes * part.intermediate_size * element_bytes)
        yield Stream(name="activation", token_bytes=moved, kernels=1, count=dense)
    if not routed:
        return
    visited = part.experts_per_token
    width = _ROUTING_PASSES_HIDDEN * hidden + _ROUTING_PASSES_EXPERT * part.expert_size
    moved = float(visited * width * element_bytes)
    yield Stream(name="routing", token_bytes=moved, kernels=_ROUTING_KERNELS, count=routed)
    if part.shared_expert_size:
        moved = float((passes * part.shared_expert_size + 3 * hidden) * element_bytes)
        yield Stream(name="shared_expert", token_bytes=moved, kernels=2, count=routed)
