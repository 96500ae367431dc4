"""What one forward of a served model runs on one GPU: its products, its small kernels, its cache.

The kernels are those of an engine that computes a norm, the rotary embedding and a gated activation by
one kernel each, query, key and value by one product, and gate and up by one: `runners/serving` does.
What surrounds a mixture's experts and latent attention runs as transformers writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from planner.families import parameter_shapes
from planner.memory.kinds import MOE
from planner.memory.templates import monomial_values
from planner.model import ModelSpec
from planner.serving.memory import quantised_bytes
from planner.speed.operation_lists import forward_layer_rows
from planner.speed.stream_kinds import stream_number
from planner.workload import Precision, TrainingWorkload, WeightsDtype

COPY = stream_number("copy", "bf16")
# The name of those small kernels that sort or choose the largest, which pass over their values more than once.
SORTS = "sorts"
_PLAIN_BYTES = {WeightsDtype.BF16: 2, WeightsDtype.FP16: 2, WeightsDtype.FP32: 4}
# A grouped product has a second kernel, which prepares it.
_GROUPED_KERNELS = 2
# DeepSeek's queries and keys are rotated, joined and copied by ten kernels (list of deepseek_v2).
_LATENT_KERNELS = 10
# Kernels of transformers' own RMS norm (to fp32, square, mean, eps, root, two products, back), rotary embedding
# (two products, a half turned and joined, a sum) and gated activation.
_KERNELS_APART = {"norms": 8, "rotary": 5, "activation": 2}
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
    """A small kernel bound by memory, run `count` times: what it moves for each token, and besides.

    `kind` is the number of its measured curve (`planner.speed.stream_kinds`).
    """

    name: str
    count: int
    token_bytes: float
    fixed_bytes: float = 0.0
    kind: int = COPY


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
        return products + sum(one.count for one in self.streams) + 1 + STEP_KERNELS


def forward_work(
    part: ModelSpec, weights_dtype: WeightsDtype, *, joins_qkv: bool = True, fused: bool = True
) -> ForwardWork:
    """Return the work of the part of a model that one GPU holds.

    Not `fused`, norms, rotary embedding and gated activations are the kernels of transformers' own code.
    """
    element_bytes = 4 if weights_dtype is WeightsDtype.FP32 else 2
    return ForwardWork(
        products=(
            *_attention_products(part, weights_dtype, joins_qkv),
            *_mlp_products(part, weights_dtype, fused),
        ),
        streams=tuple(
            one if fused else _apart(one)
            for one in (
                *_norms(part, element_bytes),
                *_around_attention(part, element_bytes),
                *_around_mlp(part, element_bytes),
            )
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


def _attention_products(part: ModelSpec, dtype: WeightsDtype, joins_qkv: bool) -> Iterator[Product]:
    hidden, count = part.hidden_size, part.num_layers
    output = (part.attended_size, hidden)
    if part.latent is None:
        if joins_qkv:
            yield _product("qkv", (hidden, part.query_size + 2 * part.kv_size), count, dtype)
        else:
            yield _product("query", (hidden, part.query_size), count, dtype)
            yield _product("key_and_value", (hidden, part.kv_size), 2 * count, dtype)
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


def _mlp_products(part: ModelSpec, dtype: WeightsDtype, fused: bool) -> Iterator[Product]:
    hidden, routed = part.hidden_size, part.num_expert_layers
    joined = part.mlp_products - 1
    if dense := part.num_layers - routed:
        width = part.intermediate_size
        if fused:
            yield _product("mlp_up", (hidden, joined * width), dense, dtype)
        else:
            yield _product("mlp_up", (hidden, width), joined * dense, dtype)
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
        yield _stream("norms", parameter.count, 2 * width * element_bytes)


def _apart(stream: Stream) -> Stream:
    """Return a fused kernel's work as transformers' own code has it: more kernels, each over all of it."""
    kernels = _KERNELS_APART.get(stream.name, 1)
    return replace(stream, count=stream.count * kernels)


def _stream(name: str, count: int, token_bytes: float) -> Stream:
    return Stream(name=name, count=count, token_bytes=float(token_bytes))


def _around_attention(part: ModelSpec, element_bytes: int) -> Iterator[Stream]:
    """Rotary embedding, what latent attention copies, the two residual sums."""
    count, latent = part.num_layers, part.latent
    if latent is not None:
        heads = part.num_heads
        joined = heads * (2 * latent.nope_dim + 7 * latent.rope_dim + 2 * latent.value_dim)
        each = (2 * part.query_size + joined) * element_bytes / _LATENT_KERNELS
        yield _stream("latents", count * _LATENT_KERNELS, each)
    elif part.rotary_dim:
        # One kernel for the queries and one for the keys.
        yield _stream("rotary", 2 * count, (part.query_size + part.kv_size) * element_bytes)
    yield _stream("residuals", 2 * count, 3 * part.hidden_size * element_bytes)


def _around_mlp(part: ModelSpec, element_bytes: int) -> Iterator[Stream]:
    hidden, routed = part.hidden_size, part.num_expert_layers
    passes = part.mlp_products
    if dense := part.num_layers - routed:
        yield _stream("activation", dense, passes * part.intermediate_size * element_bytes)
    if not routed:
        return
    yield _stream("routing", (_GROUPED_KERNELS - 1) * 2 * routed, 0.0)
    yield from _routing(part, routed)
    if width := part.shared_expert_size:
        yield _stream("activation", routed, passes * width * element_bytes)
        yield _stream("residuals", routed, 3 * hidden * element_bytes)


def _routing(part: ModelSpec, routed: int) -> Iterator[Stream]:
    """What chooses experts, brings tokens to them and back: as transformers does, from its trace."""
    workload = TrainingWorkload(precision=Precision.BF16)
    for row, count in forward_layer_rows(part, workload, MOE):
        kind, dtype, monomial, element_bytes = row if len(row) == 4 else (row[0], "", "", 0)
        names = monomial.split("*")
        if not _ROUTED.intersection(names) or "shared_experts" in names:
            continue
        moved = element_bytes * prod(int(name) for name in names if name.isdigit())
        symbols = "*".join(name for name in names if not name.isdigit())
        moved *= float(monomial_values(part, (symbols,), 1.0, 1.0)[0])
        is_fixed = "seq" not in names
        yield Stream(
            name=SORTS if kind == "sort" else "routing",
            count=routed * count,
            token_bytes=0.0 if is_fixed else moved,
            fixed_bytes=moved if is_fixed else 0.0,
            kind=stream_number(kind, dtype),
        )


_ROUTED = frozenset(("top_k", "experts", "group_experts", "expert_groups"))
