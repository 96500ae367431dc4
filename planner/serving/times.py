"""How long a served model's forwards take, kernel by kernel: prefill, decode and both in one step.

Products of many tokens, small kernels and prefill's attention go at the rates that `planner.speed` has of
the GPU. What training never runs is measured apart: products of a few tokens read their weights at the
rate of a large copy (the same curves), decode attention reads the cache at what
recorded/kernels/h200-decode.jsonl says. Between two kernels of a CUDA graph passes a moment, and a forward
that is not a graph takes at least the host's time to start its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np

from planner.decode_run import MAX_CONTEXT
from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.serve_run import MAX_GRAPH_TOKENS
from planner.serving.curves import MOST_FEW_TOKENS, decode_attention_s, few_tokens_s
from planner.serving.memory import KV_ELEMENT_BYTES
from planner.serving.part import serving_part
from planner.serving.work import (
    COPY,
    SORTS,
    STEP_KERNELS,
    ForwardWork,
    Product,
    Stream,
    forward_work,
)
from planner.speed.calibrated import MEASURED_ID, measured_gpu, rates_of
from planner.speed.rates import Rates, layout_number
from planner.units import MIB_BYTES
from planner.workload import KvDtype, WeightsDtype

# From a profile of decode steps (Llama-3.2-1B, batch 1, recorded/h200-profile.jsonl): 263 kernels are busy for 1.20
# of 1.30 ms, so 0.38 us pass between two; the small ones take 1.43 us, 0.81 less than a copy timed by itself; and
# the choice of the largest logit takes 35 us for 128,256 (40 for 16 rows of them), one block for each row.
_BETWEEN_KERNELS_S, _STARTED_S, _ARGMAX_S = 0.38e-6, 0.81e-6, 0.29e-9
# Products of so many tokens are measured ones of few; from these on the curves of training hold, and between
# them time goes by a straight line.
_MANY_TOKENS = 2 * MOST_FEW_TOKENS
# With a scale for each token and head, over pages of 64, each cached token of a head takes so much longer than
# along the curves, which are without pages: 155 us beside 127 for 32 x 8,192 tokens of heads of 128, 117 beside 75
# for 64 x 4,096 of heads of 64 (kernels timed by themselves, with the tiles of today).
_PAGED_TOKEN_S, _PAGED_NARROW_TOKEN_S, _NARROW_HEAD = 13e-12, 20e-12, 64
# A GPU that computes for long runs into its power limit, and one that has rested computes faster than the
# curves of calls repeated, which are between. Prefills of up to 22 ms take 0.87 of these, from 60 ms on 1.09 (a
# product repeated for long: 1.18, the "sustained" points of planner/speed/h200.json). Fitted to Llama-3.1-8B's and
# Llama-3.2-1B's lone prefills of 64 to 4,096 tokens, and to their prefills of 16 x 1,024 and 32 x 8,192.
_POWER_TIMES_S, _POWER_FACTORS = (22e-3, 60e-3), (0.87, 1.09)
# Experts of a random router are visited unevenly: their grouped products take longer than even ones of
# the curves, and reach only so much of the sheet's FLOPs. Both fitted to Qwen3-30B-A3B at batch 16.
_UNEVEN_FACTOR, _UNEVEN_SHARE = 1.21, 0.26
# A sort of a few values, or their largest, takes so much longer than a copy: fitted to the same model at
# batch 1.
_SORT_S = 9.6e-6
_KINDS_FROM_BYTES = float(4 * MIB_BYTES)
# Of what products reach, attention over latents is assumed to reach half: it is bound by FLOPs with many heads.
_LATENT_SHARE = 0.5
# Our Hopper forward over torch's SDPA, causal, mean of recorded/kernels/h200-attention-forward.jsonl; it
# takes heads of 64 and 128 elements, other widths go to Triton's.
_HOPPER_OVER_SDPA = 1.13
_HOPPER, _HOPPER_HEADS = "9.0", (64, 128)
# The host's seconds for a forward that is no graph: at all, and for each kernel of ours (a Triton launch
# through torch's dispatcher), fitted to two traces that were served so (4b9cdfe1b06d1b35 and b7dcbad6e5500c05, since
# withdrawn); and for each of torch's
# (planner/speed/h200.json: the host's for Llama, with its pace). Alone, a decode attention takes 0.107 ms of
# the host (batch 1, 4,096 tokens, timed with the host's start).
_HOST_FORWARD_S = 8e-3
_HOST_OWN_S = 116e-6
_HOST_TORCH_S = 26e-6
# Before a prefill's graph a dozen small operations put tokens and block tables where it reads them.
_REPLAY_S = 12 * _HOST_TORCH_S
# What our engine's host does in a step while the GPU waits, and for each request that decodes (its page, its
# token), and for a chunk of a prompt (its room, who decodes then): fitted to two traces of Llama-3.2-1B, of few
# requests at once and of many.
_STEP_HOST_S, _ROW_HOST_S, _CHUNK_HOST_S = 0.09e-3, 13e-6, 0.2e-3
# Bytes for each cached element that the kernels move which put what lies before a chunk in a row: pages are
# gathered and copied, those of one byte also widened to fp32, multiplied by their gathered scales, and narrowed.
_GATHERED_BYTES, _WIDENED_BYTES = (4.0, 4.0), (2.0, 5.0, 0.0, 8.0, 6.0, 4.0)
# Kernels and slices by which a chunk's layer gathers the pages of what lies before it.
_GATHERING_KERNELS = 6
_OWN_KERNELS = ("norms", "activation", "rotary")
_SMALL_KERNELS = (*_OWN_KERNELS, "residuals")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as one group of GPUs serves it.

    `token_scales`: a one-byte cache has a scale for each token and head (an int8 cache always has).
    `expands_latents`: latent attention caches the keys and values of all heads, as `runners/serving`
    does, not the latents. `graphs`: decode steps are CUDA graphs, and so are prefills of
    few tokens, where fewer than `graphed_tokens` lie before them. `fused`: norms, rotary embedding and gated activations are one kernel each.
    """

    spec: ModelSpec
    gpu: Gpu
    weights_dtype: WeightsDtype = WeightsDtype.BF16
    kv_dtype: KvDtype = KvDtype.BF16
    tensor_parallel: int = 1
    token_scales: bool = False
    expands_latents: bool = False
    graphs: bool = True
    joins_qkv: bool = True
    graphed_tokens: int = MAX_CONTEXT
    fused: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One kind of work of a forward on one GPU; `bound` is compute, hbm, interconnect or host."""

    name: str
    flops: float
    bytes: float
    time_s: float
    bound: str


class StepTimes:
    """Times of a served model's forwards on one of its GPUs; `source` says where the rates are from.

    Raises PlanError where the model cannot be divided over so many GPUs.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.rates = rates_of(served.gpu)
        self.part = serving_part(served.spec, served.tensor_parallel)
        joins = served.joins_qkv and served.fused
        self.work = forward_work(
            self.part, served.weights_dtype, joins_qkv=joins, fused=served.fused
        )
        # The curves of serving are the measured GPU's: another's memory sets how much slower it is.
        bandwidth = measured_gpu().mem_bandwidth_bytes_s
        self._slower = bandwidth / self.rates.memory_bytes_s
        self._forward = lru_cache(maxsize=4096)(self._forward_parts)
        self._curve_s = lru_cache(maxsize=65_536)(self._interpolated_s)

    @property
    def source(self) -> str:
        """Where the rates are from: measured on this kind of GPU, or another's share of its sheet."""
        return self.rates.source

    @property
    def is_measured(self) -> bool:
        """Whether this kind of GPU was measured."""
        return self.served.gpu.id == MEASURED_ID

    def prefill_s(self, num_tokens: int, context_tokens: int = 0, rows: int = 1) -> float:
        """Return the seconds to run `num_tokens` of each of `rows` sequences after `context_tokens`."""
        return _total_s(self.prefill_parts(num_tokens, context_tokens, rows))

    def decode_s(self, batch: int, total_context_tokens: int) -> float:
        """Return the seconds of one step of `batch` sequences that hold so many tokens together."""
        return _total_s(self.decode_parts(batch, total_context_tokens))

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context_total: int,
        waits: bool = True,
    ) -> float:
        """Return the seconds of a chunk of one prompt and a decode step after it; either may be none.

        With them goes what an engine's host does in a step: admit, take pages, read the tokens. Not
        `waits`: no token is read, so the host's part is hidden behind the chunk before.
        """
        prefill = self.prefill_s(prefill_tokens, prefill_context) if prefill_tokens else 0.0
        decode = self.decode_s(decode_batch, decode_context_total) if decode_batch else 0.0
        host = _STEP_HOST_S + decode_batch * _ROW_HOST_S
        host += _CHUNK_HOST_S if prefill_tokens else 0.0
        if waits or not self._is_graph(prefill_tokens, prefill_context):
            return prefill + decode + host
        return max(prefill - _REPLAY_S, host + _REPLAY_S)

    def prefill_parts(
        self, num_tokens: int, context_tokens: int = 0, rows: int = 1
    ) -> tuple[StepPart, ...]:
        """Return what `prefill_s` adds up. Raises ValueError for no tokens or no rows."""
        if num_tokens < 1 or rows < 1 or context_tokens < 0:
            given = f"{rows} rows of {num_tokens} tokens after {context_tokens}"
            raise ValueError(f"a prefill of {given}; it needs a row and a token at least")
        tokens = num_tokens * rows
        parts = self._prefilling(num_tokens, context_tokens, rows, 1.0)
        factor = _power_factor(_total_s(parts))
        parts = self._prefilling(num_tokens, context_tokens, rows, factor)
        if self._is_graph(tokens, context_tokens):
            replay = StepPart(
                name="host_waiting", flops=0.0, bytes=0.0, time_s=_REPLAY_S, bound="host"
            )
            return (*parts, replay)
        gathering = _GATHERING_KERNELS * self.part.num_layers if context_tokens else 0
        return (*parts, *self._host_part(parts, gathering))

    def _is_graph(self, tokens: int, context_tokens: int) -> bool:
        """Whether a prefill of so many tokens in all, after so many of each row, is one CUDA graph."""
        is_few = tokens <= MAX_GRAPH_TOKENS and context_tokens < self.served.graphed_tokens
        return self.served.graphs and is_few

    def _prefilling(
        self, num_tokens: int, context_tokens: int, rows: int, power: float
    ) -> tuple[StepPart, ...]:
        return (
            *self._forward(num_tokens * rows, rows, power),
            self._prefill_attention(num_tokens, context_tokens, rows, power),
        )

    def decode_parts(self, batch: int, total_context_tokens: int) -> tuple[StepPart, ...]:
        """Return what `decode_s` adds up. Raises ValueError for no sequences."""
        if batch < 1 or total_context_tokens < 0:
            given = f"{batch} sequences of {total_context_tokens} tokens together"
            raise ValueError(f"a decode step of {given}; it needs a sequence at least")
        parts = (
            *self._forward(batch, batch, 1.0),
            self._decode_attention(batch, total_context_tokens),
        )
        return parts if self.served.graphs else (*parts, *self._host_part(parts, 0))

    def _forward_parts(self, tokens: int, logit_rows: int, power: float) -> tuple[StepPart, ...]:
        """Everything but attention: the same for prefill and decode of as many tokens.

        Products that are bound by FLOPs take `power` times as long as their curves say.
        """
        work, few = self.work, self.work.element_bytes
        products = self._products("products", work.products, tokens, power)
        head = self._products("head", (work.head,), logit_rows, power)
        moved = sum(one.count * _moved(one, tokens) for one in work.streams)
        time_s = sum(
            one.count * self._stream_s(_moved(one, tokens), one.kind) for one in work.streams
        )
        time_s += _SORT_S * sum(one.count for one in work.streams if one.name == SORTS)
        if self.served.fused:
            small = sum(one.count for one in work.streams if one.name in _SMALL_KERNELS)
            time_s -= _STARTED_S * (small + STEP_KERNELS)
        time_s += STEP_KERNELS * self._stream_s(tokens * self.part.hidden_size * few)
        time_s += _ARGMAX_S * self.part.vocab_size + _BETWEEN_KERNELS_S
        rest = StepPart(
            name="elementwise", flops=0.0, bytes=float(moved), time_s=time_s, bound="hbm"
        )
        return tuple(part for part in (products, head, rest, *self._sent(tokens, logit_rows)))

    def _products(
        self, name: str, products: Iterable[Product], tokens: int, power: float
    ) -> StepPart:
        listed = tuple(products)
        sizes = [self._times_and_bytes(one, tokens, power) for one in listed]
        flops = sum(
            2.0
            * one.count
            * tokens
            * one.inner
            * one.columns
            * (self.part.experts_per_token if one.experts else 1)
            for one in listed
        )
        time_s = sum(one.count * time_s for one, (time_s, _) in zip(listed, sizes, strict=True))
        moved = sum(one.count * moved for one, (_, moved) in zip(listed, sizes, strict=True))
        peak = self.rates.peak_flop_s["fp32" if self.work.element_bytes == 4 else "bf16"]
        bound = "compute" if flops / peak > moved / self.rates.memory_bytes_s else "hbm"
        return StepPart(name=name, flops=flops, bytes=moved, time_s=time_s, bound=bound)

    def _times_and_bytes(self, product: Product, tokens: int, power: float) -> tuple[float, float]:
        """Seconds and HBM bytes of one product; of a mixture those of all experts that are visited."""
        visited, rows = 1.0, float(tokens)
        if product.experts:
            share = self.part.experts_per_token / product.experts
            visited = product.experts * (1.0 - (1.0 - share) ** tokens)
            rows = tokens * self.part.experts_per_token / visited
        wide = visited * rows * (product.inner + product.columns) * self.work.element_bytes
        moved = visited * product.weight_bytes + wide
        many_s = self._many_s(product, visited, rows, moved, power) + _BETWEEN_KERNELS_S
        if product.experts or tokens >= _MANY_TOKENS:
            return many_s, moved
        few_s = self._slower * few_tokens_s(product.weight_bytes, float(tokens))
        between = max(0.0, tokens / MOST_FEW_TOKENS - 1.0)
        return few_s + between * (many_s - few_s), moved

    def _many_s(
        self, product: Product, visited: float, rows: float, moved: float, power: float
    ) -> float:
        """The measured product's time, with the bytes that are read where weights are quantised."""
        dtype = "fp32" if self.work.element_bytes == 4 else "bf16"
        sizes = (
            np.array([rows]),
            np.array([float(product.columns)]),
            np.array([float(product.inner)]),
        )
        kind, layout = ("grouped", "nn") if product.experts else ("mm", "nt")
        layouts = np.array([layout_number(layout)])
        measured_s = float(
            self.rates.product_s(kind, dtype, layouts, np.array([visited]), sizes)[0]
        )
        computed_s = 2.0 * visited * rows * product.inner * product.columns
        computed_s /= self.rates.peak_flop_s[dtype]
        plain = product.inner * product.columns * self.work.element_bytes
        full_s = (moved + visited * (plain - product.weight_bytes)) / self.rates.memory_bytes_s
        read_s = moved / self.rates.memory_bytes_s
        taken_s = measured_s * float(np.hypot(computed_s, read_s) / np.hypot(computed_s, full_s))
        if product.experts:
            return max(_UNEVEN_FACTOR * taken_s, computed_s / _UNEVEN_SHARE)
        return (power if computed_s > full_s else 1.0) * taken_s

    def _stream_s(self, size_bytes: float, kind: int = COPY) -> float:
        """A kernel that moves so many bytes, and what passes before it.

        Kinds were measured from 4 MiB on; what one takes beyond a copy there shrinks with its bytes.
        """
        taken_s = self._curve_s(COPY, size_bytes)
        if kind != COPY and size_bytes >= _KINDS_FROM_BYTES:
            taken_s = self._curve_s(kind, size_bytes)
        elif kind != COPY:
            more_s = self._curve_s(kind, _KINDS_FROM_BYTES) - self._curve_s(COPY, _KINDS_FROM_BYTES)
            taken_s += max(0.0, more_s) * size_bytes / _KINDS_FROM_BYTES
        return taken_s + _BETWEEN_KERNELS_S

    def _interpolated_s(self, kind: int, size_bytes: float) -> float:
        return float(self.rates.stream_s(kind, np.float64(max(size_bytes, 1.0))))

    def _decode_attention(self, batch: int, total_context_tokens: int) -> StepPart:
        """One query of each sequence over its cache; the new tokens are written, too."""
        served, part = self.served, self.part
        elements, scales = _cached(part, served)
        seen = self._seen_tokens(batch, total_context_tokens)
        read = seen * elements * KV_ELEMENT_BYTES[served.kv_dtype]
        flops = seen * self._flops_per_cached_token()
        computed_s = flops / (_LATENT_SHARE * self.rates.peak_flop_s["bf16"])
        layers = part.num_layers
        heads = elements / (2.0 * part.head_dim)
        read_heads = seen / layers * heads
        each_s = decode_attention_s(served.kv_dtype, scales > 0, part.head_dim, batch, read_heads)
        if scales:
            is_narrow = part.head_dim <= _NARROW_HEAD
            each_s += read_heads * (_PAGED_NARROW_TOKEN_S if is_narrow else _PAGED_TOKEN_S)
        read_s = layers * self._slower * each_s
        append = layers * self._stream_s(batch * elements * 4.0)
        return StepPart(
            name="attention",
            flops=flops,
            bytes=read + 4.0 * seen * scales,
            time_s=append + max(read_s, computed_s),
            bound="compute" if computed_s > read_s else "hbm",
        )

    def _seen_tokens(self, batch: int, total_context_tokens: int) -> float:
        """Cached tokens that a step reads over all layers, sequences taken as equally long."""
        part = self.part
        total = float(total_context_tokens)
        windowed = min(total, batch * float(part.sliding_window or total))
        sliding = part.num_sliding_layers
        return (part.num_layers - sliding) * total + sliding * windowed

    def _flops_per_cached_token(self) -> float:
        """QK^T and PV of one query over one cached token of a layer; over latents, DeepSeek-V2, 2.1.2."""
        part = self.part
        if part.latent is None or self.served.expands_latents:
            return 2.0 * (part.query_size + part.attended_size)
        return 2.0 * part.num_heads * (2 * part.latent.kv_rank + part.latent.rope_dim)

    def _prefill_attention(
        self, num_tokens: int, context_tokens: int, rows: int, power: float
    ) -> StepPart:
        """Causal attention of new tokens over themselves and what lies before them, and its cache."""
        part, sliding = self.part, self.part.num_sliding_layers
        full = part.num_layers - sliding
        kinds = ((None, full), (part.sliding_window, sliding))
        flops = time_s = moved = 0.0
        elements, _ = _cached(part, self.served)
        written = rows * num_tokens * elements * (2.0 + KV_ELEMENT_BYTES[self.served.kv_dtype])
        for window, layers in kinds:
            if not layers:
                continue
            pairs = _pairs(num_tokens, context_tokens, window)
            one = 2.0 * rows * pairs * (part.query_size + part.attended_size)
            flops += layers * one
            time_s += layers * power * self._fresh_s(num_tokens, context_tokens, rows, one)
            time_s += layers * self._stream_s(written)
            moved += layers * written
            if context_tokens:
                # Of keys and of values, which are half of the elements each.
                gathered = rows * (context_tokens + num_tokens) * elements / 2
                is_byte = KV_ELEMENT_BYTES[self.served.kv_dtype] == 1
                for each in _WIDENED_BYTES if is_byte else _GATHERED_BYTES:
                    time_s += layers * 2 * self._stream_s(gathered * each)
                    moved += layers * 2 * gathered * each
        return StepPart(name="attention", flops=flops, bytes=moved, time_s=time_s, bound="compute")

    def _fresh_s(self, num_tokens: int, context_tokens: int, rows: int, flops: float) -> float:
        part, total = self.part, float(num_tokens + context_tokens)
        if self.work.element_bytes == 4:
            return _BETWEEN_KERNELS_S + flops / (0.5 * self.rates.peak_flop_s["fp32"])
        is_hopper = self.served.gpu.compute_capability == _HOPPER and part.latent is None
        is_hopper = is_hopper and part.head_dim in _HOPPER_HEADS
        kind = "attention_forward_sdpa" if is_hopper else "attention_forward_triton"
        head_dim = (part.head_dim + part.value_dim) / 2
        heads = float(rows * part.num_heads)
        taken_s = float(self.rates.attention_s(kind, heads, total, head_dim, flops))
        tail = _tail(num_tokens, heads, self.rates) / _tail(total, heads, self.rates)
        faster = _HOPPER_OVER_SDPA if is_hopper else 1.0
        return taken_s * tail / faster + _BETWEEN_KERNELS_S

    def _sent(self, tokens: int, logit_rows: int) -> tuple[StepPart, ...]:
        """Two all-reduces of the hidden states for each layer, one after the embedding's rows; logits.

        Each GPU has the logits of its share of the vocabulary, and gathers the others'.
        """
        ranks = self.served.tensor_parallel
        if ranks == 1:
            return ()
        reduces, element_bytes = 2 * self.part.num_layers + 1, self.work.element_bytes
        hidden = float(tokens * self.part.hidden_size * element_bytes)
        logits = float(logit_rows * self.served.spec.vocab_size * element_bytes)
        ring = (ranks - 1) / ranks
        found = []
        for name, calls, size, passes in (
            ("all_reduce", reduces, hidden, 2),
            ("all_gather", 1, logits, 1),
        ):
            each_s = float(self.rates.collective_s(name, size, ranks))
            found.append(
                StepPart(
                    name=name,
                    flops=0.0,
                    bytes=calls * size * passes * ring,
                    time_s=calls * each_s,
                    bound="interconnect",
                )
            )
        return tuple(found)

    def _host_part(self, parts: Iterable[StepPart], more_kernels: int) -> tuple[StepPart, ...]:
        """What the GPU waits for the host that starts every kernel of a forward."""
        host_s = _host_s(self.part, self.work) + more_kernels * _HOST_TORCH_S
        waited_s = host_s - _total_s(parts)
        if waited_s <= 0:
            return ()
        return (StepPart(name="host_waiting", flops=0.0, bytes=0.0, time_s=waited_s, bound="host"),)


def _power_factor(time_s: float) -> float:
    """Return how many times as long as its curves a forward of so many seconds computes."""
    found = np.interp(np.log(time_s), np.log(_POWER_TIMES_S), _POWER_FACTORS)
    return round(float(found), 3)


def _host_s(part: ModelSpec, work: ForwardWork) -> float:
    """Return the host's seconds to start the kernels of a forward that is not a CUDA graph."""
    own = sum(one.count for one in work.streams if one.name in _OWN_KERNELS) + 2 * part.num_layers
    return _HOST_FORWARD_S + own * _HOST_OWN_S + (work.kernels - own) * _HOST_TORCH_S


def _moved(stream: Stream, tokens: int) -> float:
    return stream.token_bytes * tokens + stream.fixed_bytes


def _total_s(parts: Iterable[StepPart]) -> float:
    return sum(part.time_s for part in parts)


def _tail(length: float, heads: float, rates: Rates) -> float:
    """Time of whole waves of blocks of 128 queries, over that of as many as there are."""
    waves = ceil(length / 128) * heads / rates.multiprocessors
    return ceil(waves) / waves


def _pairs(num_tokens: int, context_tokens: int, window: int | None) -> float:
    """Query-key pairs of new tokens after a context, each seeing at most `window` keys."""
    first, last = context_tokens + 1.0, float(context_tokens + num_tokens)
    if window is None or last <= window:
        return (first + last) * num_tokens / 2
    if first >= window:
        return float(window * num_tokens)
    growing = window - context_tokens
    return (first + window) * growing / 2 + (num_tokens - growing) * float(window)


def _cached(part: ModelSpec, served: ServedModel) -> tuple[float, float]:
    """Elements that a layer caches per token, and scales."""
    one_byte = served.kv_dtype in (KvDtype.FP8, KvDtype.INT8)
    has_scales = one_byte and (served.token_scales or served.kv_dtype is KvDtype.INT8)
    if part.latent is None:
        return 2.0 * part.kv_size, 2.0 * part.num_kv_heads * has_scales
    if served.expands_latents:
        return 2.0 * part.query_size, 2.0 * part.num_heads * has_scales
    return float(part.latent.kv_rank + part.latent.rope_dim), 2.0 * has_scales
