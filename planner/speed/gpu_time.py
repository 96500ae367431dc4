"""The GPU's time for the operations of a micro-batch, by phase and kind of operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.memory.attention import takes_head_sizes
from planner.model import ModelSpec
from planner.operations import attended_pairs
from planner.speed.operation_lists import (
    PHASES,
    SECTIONS,
    OperationList,
    Products,
    Streams,
    is_masked,
    operation_list,
)
from planner.speed.rates import FP32_ATTENTION, Rates
from planner.workload import Attention, Precision, TrainingWorkload

_BACKWARD_FLOPS = 2.5
# Fused attention in fp32 that was not measured: without tensor cores, at about half of what products reach.
_FP32_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of operation of one phase: FLOPs, bytes, kernels and the GPU's time.

    `section` is "embed" or "loss" where only a part of a split model runs it.
    """

    phase: str
    name: str
    flops: Any
    bytes: Any
    launches: float
    time_s: Any
    section: str | None = None

    @property
    def shown_phase(self) -> str:
        """The phase that its time belongs to: what is computed again is, in the backward."""
        return "backward" if self.phase == "recompute" else self.phase


def micro_batch_parts(
    spec: ModelSpec,
    workload: TrainingWorkload,
    kinds: Sequence[str],
    rates: Rates,
    b: Any,
    s: Any,
) -> list[Part]:
    """Return the operations of one micro-batch of b rows of s tokens."""
    found = operation_list(spec, workload, kinds)
    sizes = found.sizes.at(b, s)
    parts = [part for products in found.products for part in _product_parts(products, rates, sizes)]
    parts += _stream_parts(found.streams, rates, sizes)
    parts += _attention_parts(spec, workload, found, rates, b, s)
    return parts


def _along(values: Any, like: Any) -> Any:
    return values.reshape((-1,) + (1,) * (like.ndim - 1))


def _product_parts(products: Products, rates: Rates, sizes: Any) -> list[Part]:
    batch, m, n, k = sizes[products.sizes]
    flops, elements = 2.0 * batch * m * n * k, batch * (m * k + k * n + m * n)
    if products.kind == "grouped":
        flops, elements = flops / batch, (m * (k + n) + batch * k * n)
        m = np.maximum(m / batch, 1.0)
    layouts = _along(products.layouts, m)
    time_s = rates.product_s(products.kind, products.dtype, layouts, batch, (m, n, k))
    moved = elements * (2 if products.dtype == "bf16" else 4)
    return _parts(products, flops, moved, time_s + rates.gap_s)


def _stream_parts(streams: Streams, rates: Rates, sizes: Any) -> list[Part]:
    moved = sizes[streams.sizes] * _along(streams.element_bytes, sizes)
    time_s = rates.warm_stream_s(_along(streams.kinds, sizes), moved)
    return _parts(streams, None, moved, time_s + rates.gap_s)


def _parts(listed: Products | Streams, flops: Any, moved: Any, time_s: Any) -> list[Part]:
    """Sum up operations [operations, *shape] by the parts of a step that run them."""
    counts = listed.counts
    sums = [_summed(counts, values) for values in (moved, time_s)]
    computed = [0.0] * len(counts) if flops is None else _summed(counts, flops)
    launches = counts.sum(axis=1).tolist()
    return [
        Part(
            phase=PHASES[phase],
            name=name,
            flops=f,
            bytes=m,
            launches=n,
            time_s=t,
            section=SECTIONS.get(name),
        )
        for (phase, name), f, m, n, t in zip(
            listed.parts, computed, sums[0], launches, sums[1], strict=True
        )
    ]


def _summed(counts: Any, values: Any) -> Any:
    """[parts, operations] x [operations, *shape]; plain numbers where there is no shape."""
    if values.ndim == 1:
        return (counts @ values).tolist()
    flat = values.reshape(len(values), -1)
    return (counts @ flat).reshape((len(counts), *values.shape[1:]))


def _runs_on_hopper(spec: ModelSpec, workload: TrainingWorkload, row: str) -> bool:
    """Whether our attention's kernels for Hopper take a layer, if they run on the GPU at all."""
    direction = row.removeprefix("attention_")
    return (
        workload.attention is Attention.TRITON
        and workload.precision is not Precision.FP32
        and direction not in spec.portable_attention
        and takes_head_sizes(spec, direction)
    )


def _attention_parts(
    spec: ModelSpec, workload: TrainingWorkload, found: OperationList, rates: Rates, b: Any, s: Any
) -> list[Part]:
    out = []
    for (phase, row, slides), count in found.attention.items():
        masked = is_masked(workload, slides)
        is_triton = workload.attention is Attention.TRITON
        window = spec.sliding_window if slides and is_triton else None
        pairs = s * s if masked else attended_pairs(s, window)
        flops = 2.0 * b * pairs * (spec.query_size + spec.attended_size)
        if row == "attention_backward":
            flops = flops * _BACKWARD_FLOPS
        kind = f"{row}_{workload.attention}" + ("_masked" if masked else "")
        if _runs_on_hopper(spec, workload, row):
            kind = rates.hopper_kind(row) or kind
        head_dim = (spec.head_dim + spec.attended_size / spec.num_heads) / 2
        in_fp32 = workload.precision is Precision.FP32
        kind += FP32_ATTENTION if in_fp32 else ""
        if in_fp32 and kind not in rates.attention:
            time_s = flops / (_FP32_SHARE * rates.peak_flop_s["fp32"])
        else:
            time_s = rates.attention_s(kind, b * spec.num_heads, s, head_dim, flops)
        time_s = time_s + rates.gap_s
        if isinstance(time_s, float):
            time_s = float(time_s)  # of Python, which adds faster than NumPy's
        width = 2 * (spec.query_size + spec.kv_size) * (2 if row == "attention_backward" else 1)
        moved = b * s * width * 2.0
        out.append(
            Part(PHASES[phase], "attention", flops * count, moved * count, count, time_s * count)
        )
    return out
