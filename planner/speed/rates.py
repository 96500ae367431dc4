"""How fast one kind of GPU is: times of operations, interpolated between measured points.

Points come from `peakmark calibrate`. Where there are none, the vendor's sheet stands in, derated by
what an H200 reaches of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.calibration import Curve
from planner.speed.host import HostTable
from planner.speed.host_updates import HostUpdates, updates_from_curves
from planner.speed.stream_kinds import STREAM_KINDS, stand_ins, stream_number

Floats = NDArray[np.float64]

# Of two rates that bound an operation neither is reached where both come close: the root of the sum
# of squares. What starts a kernel and ends it takes as long as the smallest kernel.
_SMALLEST_KERNEL_S = 2e-6
# Two layouts of a product are as far apart as a factor of 1.4 in one of its sizes; a point that is hit
# exactly counts 400 times one at a factor of 2.
_LAYOUT_DISTANCE, _NEAR_DISTANCE = 0.25, 0.05
_LAYOUTS = ("nt", "nn", "tn", "tt")
# Kernels that load 16 bytes at a time need rows that begin at multiples of them, of eight numbers in bf16:
# products of other matrices run kernels of their own, and so are a kind of their own.
UNALIGNED, _ALIGNED_NUMBERS = "mm_unaligned", 8
# What the kind of an attention computed in fp32 ends in, and that of our kernels for Hopper.
FP32_ATTENTION, HOPPER = "_fp32", "hopper"
# Stream times are kept at powers of sqrt(2) bytes, from 256 bytes to 16 TiB.
_FIRST_LOG2, _STEPS_PER_LOG2, _COLUMNS = 8, 2, 74
# Rows of queries that one block of a fused attention kernel takes.
_ATTENTION_ROWS = 128


@dataclass(frozen=True, slots=True)
class ProductPoints:
    """Measured products: log2 of (m, n, k) and the sum of its squares, layout, and log of ideal over
    measured time.
    """

    sizes: Floats
    squares: Floats
    layouts: Floats
    ratios: Floats


@dataclass(frozen=True, slots=True)
class AttentionPoints:
    """Measured attention: log2 of (length, head size), and log of FLOPs per second."""

    sizes: Floats
    rates: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """What one kind of GPU takes for an operation; `source` says where its numbers are from.

    `gap_s` passes from one kernel to the next: what two events without work take between them.
    """

    source: str
    peak_flop_s: Mapping[str, float]
    memory_bytes_s: float
    multiprocessors: int
    gap_s: float
    products: Mapping[tuple[str, str], ProductPoints]
    streams: Floats = field(repr=False)
    warm_streams: Floats = field(repr=False)
    attention: Mapping[str, AttentionPoints]
    collectives: Mapping[str, tuple[Floats, Floats]]
    network_share: float
    gpus_per_node: int
    host: HostTable
    host_updates: HostUpdates | None

    def product_s(
        self, kind: str, dtype: str, layouts: Any, batch: Any, sizes: tuple[Any, Any, Any]
    ) -> Any:
        """Return the times of products [m, k] x [k, n], `batch` of them each.

        `kind` is "mm", "bmm" or "grouped"; `layouts` are numbers of "nt", "nn", "tn" and "tt". All
        arguments have the same shape, operations first.
        """
        m, n, k = sizes
        element_bytes = 2 if dtype == "bf16" else 4
        ideal_s = self._ideal_s(dtype, batch, sizes, element_bytes)
        points = self.products.get((kind, dtype)) or self.products.get(("mm", dtype))
        if points is None:
            return ideal_s
        places = np.log2(np.stack((m, n, k), axis=-1))
        ratios = _near_mean(points, places, layouts)
        slow = self.products.get((UNALIGNED, dtype))
        if slow is not None and kind != "grouped":
            unaligned = _is_unaligned(layouts, sizes)
            if np.any(unaligned):
                ratios = np.where(unaligned, _near_mean(slow, places, layouts), ratios)
        return ideal_s / np.exp(ratios)

    def _ideal_s(
        self, dtype: str, batch: Any, sizes: tuple[Any, Any, Any], element_bytes: int
    ) -> Any:
        m, n, k = sizes
        computed_s = 2.0 * batch * m * n * k / self.peak_flop_s[dtype]
        moved_s = batch * (m * k + k * n + m * n) * element_bytes / self.memory_bytes_s
        return _SMALLEST_KERNEL_S + np.hypot(computed_s, moved_s)

    def stream_s(self, kinds: Any, size_bytes: Any) -> Any:
        """Return the times of operations bound by memory, by the numbers of their kinds.

        Some operands lie in the cache and some do not: the mean of both where both were measured.
        """
        return _along_curves(self.streams, kinds, size_bytes)

    def warm_stream_s(self, kinds: Any, size_bytes: Any) -> Any:
        """Return the same where the operation before has just left its results in the cache.

        So it is in a training step, as far as they fit.
        """
        return _along_curves(self.warm_streams, kinds, size_bytes)

    def attention_s(self, kind: str, rows: Any, length: Any, head_dim: float, flops: Any) -> Any:
        """Return the time of fused attention of `rows` x `length` queries and that many FLOPs.

        `rows` are sequences times heads. Blocks of queries fill whole waves of multiprocessors.
        """
        points = self.attention.get(kind) or self.attention["attention_forward_sdpa"]
        lengths, head_dims = points.sizes.T
        distance = np.square(np.asarray(np.log2(length))[..., None] - lengths)
        distance += np.square(log2(head_dim) - head_dims) + _NEAR_DISTANCE
        weights = 1.0 / np.square(distance)
        rate = np.exp(weights @ points.rates / weights.sum(-1))
        waves = np.ceil(length / _ATTENTION_ROWS) * rows / self.multiprocessors
        return 2 * _SMALLEST_KERNEL_S + flops / rate * np.ceil(waves) / waves

    def hopper_kind(self, row: str) -> str | None:
        """Return the kind of a direction of our attention's kernels for Hopper, where they were measured."""
        kind = f"{row}_{HOPPER}"
        return kind if kind in self.attention else None

    def collective_s(self, operation: str, size_bytes: Any, ranks: Any) -> Any:
        """Return the time of one collective over GPUs of a node; `size_bytes` of the full buffer.

        A ring of N ranks moves (N - 1) / N of it: times were measured between two. Beyond a node the
        network has `network_share` of the rate within it. A broadcast counts as a gather.
        """
        sizes_bytes, times_s = self.collectives.get(operation) or self.collectives["all_gather"]
        several = larger(ranks * 1.0, 2.0)
        moved = size_bytes * 2.0 * (several - 1) / several
        # A start and a rate: between two points a line.
        inside = np.interp(moved, sizes_bytes, times_s) * larger(1.0, moved / sizes_bytes[-1])
        beyond = several > self.gpus_per_node
        if isinstance(beyond, bool):
            return float(inside / self.network_share if beyond else inside)
        return inside / np.where(beyond, self.network_share, 1.0)

    def alone_s(self, operation: str, size_bytes: Any, ranks: Any) -> Any:
        """Return what a rank alone takes in the place of a collective: it fills its result."""
        if operation == "all_gather":
            return self.stream_s(stream_number("expanded_copy", "bf16"), size_bytes)
        moved = {"reduce_scatter": 2.0 / np.asarray(ranks), "all_reduce": 2.0}.get(operation, 0.0)
        return self.stream_s(stream_number("unary", "fp32"), moved * size_bytes)


def larger(first: Any, second: Any) -> Any:
    """Return the larger of two, element by element; of two numbers without NumPy, which takes longer."""
    if isinstance(first, float) and isinstance(second, float):
        return max(first, second)
    return np.maximum(first, second)


def _along_curves(table: Floats, kinds: Any, size_bytes: Any) -> Any:
    if isinstance(size_bytes, float):
        place = (log2(max(size_bytes, 256.0)) - _FIRST_LOG2) * _STEPS_PER_LOG2
        column = min(int(place), _COLUMNS - 2)
        low, high = table[kinds, column], table[kinds, column + 1]
        return exp(low + (high - low) * (place - column))
    places = (np.log2(np.maximum(size_bytes, 256.0)) - _FIRST_LOG2) * _STEPS_PER_LOG2
    columns = np.minimum(places.astype(np.int64), _COLUMNS - 2)
    lows = table[kinds, columns]
    return np.exp(lows + (table[kinds, columns + 1] - lows) * (places - columns))


def _near_mean(points: ProductPoints, sizes: Any, layouts: Any) -> Any:
    """Mean over all points, by the fourth power of distance in the log2 of the sizes."""
    # The square of a difference, so that one product of matrices does for all pairs.
    squares = np.square(sizes).sum(-1)[..., None] + points.squares
    distance = np.maximum(squares - 2.0 * (sizes @ points.sizes.T), 0.0) + _NEAR_DISTANCE
    distance += _LAYOUT_DISTANCE * (np.asarray(layouts)[..., None] != points.layouts)
    weights = 1.0 / np.square(distance)
    return weights @ points.ratios / weights.sum(-1)


def _is_unaligned(layouts: Any, sizes: tuple[Any, Any, Any]) -> Any:
    """Whether rows of [m, k], [k, n] or [m, n], as their layouts hold them, are no multiples of 16 bytes in bf16."""
    m, n, k = sizes
    rows = (np.where(np.less(layouts, 2), k, m), np.where(np.mod(layouts, 3) == 0, k, n), n)
    return np.any(
        [np.mod(row, _ALIGNED_NUMBERS) != 0 for row in np.broadcast_arrays(*rows)], axis=0
    )


def layout_number(layout: str) -> int:
    """Return the number of a layout."""
    return _LAYOUTS.index(layout)


def rates_from_curves(
    curves: Sequence[Curve],
    *,
    source: str,
    peak_flop_s: Mapping[str, float],
    memory_bytes_s: float,
    multiprocessors: int,
    network_share: float,
    gpus_per_node: int,
    host: HostTable,
    instead: Rates | None = None,
) -> Rates:
    """Return the rates of a GPU from the points of its calibration.

    What has no points goes as `instead` says.
    """
    idle_s = _between_events_s(curves) if instead is None else _own_gap_s(curves, instead)
    rates = Rates(
        source=source,
        peak_flop_s=peak_flop_s,
        memory_bytes_s=memory_bytes_s,
        multiprocessors=multiprocessors,
        gap_s=idle_s,
        products={},
        streams=_stream_table(
            curves, idle_s, instead.streams if instead else None, prefers_warm=False
        ),
        warm_streams=_stream_table(
            curves, idle_s, instead.warm_streams if instead else None, prefers_warm=True
        ),
        attention={**(instead.attention if instead else {}), **_attention_points(curves, idle_s)},
        collectives={
            **(instead.collectives if instead else {}),
            **_collective_points(curves, idle_s),
        },
        network_share=network_share,
        gpus_per_node=gpus_per_node,
        host=host,
        host_updates=updates_from_curves(curves) or (instead.host_updates if instead else None),
    )
    own = _product_points(rates, curves, idle_s)
    return replace(rates, products={**(instead.products if instead else {}), **own})


def _own_gap_s(curves: Iterable[Curve], instead: Rates) -> float:
    """What passes between two events where that was measured, else as elsewhere."""
    return next((c.time_s for c in curves if c.operation == "kernel_none"), instead.gap_s)


def _between_events_s(curves: Iterable[Curve]) -> float:
    """What passes between two events besides the work; of the smallest kernel where not measured."""
    found = {curve.operation: curve.time_s for curve in curves}
    if "kernel_none" in found:
        return found["kernel_none"]
    return max(0.0, found.get("kernel_smallest", 0.0) - _SMALLEST_KERNEL_S)


def _merged(curves: Iterable[Curve]) -> list[Curve]:
    """One curve for each operation, dtype and shape: the mean of several runs."""
    groups: dict[tuple[Any, ...], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.operation, curve.dtype, curve.shape), []).append(curve)
    return [
        Curve(**{**_fields(points[0]), "time_s": sum(p.time_s for p in points) / len(points)})
        for points in groups.values()
    ]


def _fields(curve: Curve) -> dict[str, Any]:
    return {name: getattr(curve, name) for name in Curve.__dataclass_fields__}


_PRODUCTS = {"matmul": "mm", "bmm": "bmm", "grouped": "grouped"}


def _product_points(
    rates: Rates, curves: Iterable[Curve], idle_s: float
) -> dict[tuple[str, str], ProductPoints]:
    groups: dict[tuple[str, str], list[tuple[Curve, str]]] = {}
    for curve in _merged(curves):
        name, _, layout = curve.operation.partition("_")
        if name in _PRODUCTS and curve.flops and "sustained" not in layout:
            # Earlier calibrations measured the experts' forward alone.
            layout = "nn" if layout == "mm" else layout
            kind = _PRODUCTS[name]
            is_whole = kind == "mm" and curve.dtype == "bf16"
            m, n, k = curve.shape[:3]
            if is_whole and _is_unaligned(layout_number(layout), (m, n, k)):
                kind = UNALIGNED
            groups.setdefault((kind, curve.dtype), []).append((curve, layout))
    return {key: _points(rates, key, found, idle_s) for key, found in groups.items()}


def _points(
    rates: Rates, key: tuple[str, str], found: Sequence[tuple[Curve, str]], idle_s: float
) -> ProductPoints:
    kind, dtype = key
    sizes = np.array([_sizes(kind, curve) for curve, _ in found], dtype=np.float64)
    batch = np.array(
        [curve.shape[3] if len(curve.shape) > 3 else 1 for curve, _ in found], dtype=np.float64
    )
    taken_s = np.array([max(curve.time_s - idle_s, _SMALLEST_KERNEL_S) for curve, _ in found])
    m, n, k = sizes.T
    ideal_s = rates._ideal_s(dtype, batch, (m, n, k), 2 if dtype == "bf16" else 4)
    layouts = np.array([layout_number(layout) for _, layout in found], dtype=np.float64)
    places = np.log2(sizes)
    squares = np.square(places).sum(-1)
    return ProductPoints(places, squares, layouts, np.log(ideal_s / taken_s))


def _sizes(kind: str, curve: Curve) -> tuple[float, float, float]:
    """(m, n, k) of one product; rows of a grouped one are those of a group."""
    m, n, k = curve.shape[:3]
    return (m / curve.shape[3] if kind == "grouped" else m, n, k)


def _stream_table(
    curves: Iterable[Curve], idle_s: float, instead: Floats | None, *, prefers_warm: bool
) -> Floats:
    """Log times by kind and size: interpolated, and beyond the points by their last rate.

    Where a kind was measured with an empty and a warm cache, the mean of both or the warm one counts;
    one that was not measured, nor anything like it, goes along `instead`.
    """
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for curve in sorted(_merged(curves), key=lambda curve: curve.operation.endswith("_warm")):
        time_s = max(curve.time_s - idle_s, _SMALLEST_KERNEL_S)
        key = (curve.operation.removeprefix("kind_").removesuffix("_warm"), curve.dtype)
        found.setdefault(key, {}).setdefault(float(curve.bytes), []).append(time_s)
    sizes = 2.0 ** (_FIRST_LOG2 + np.arange(_COLUMNS) / _STEPS_PER_LOG2)
    rows = []
    for number, kind in enumerate(STREAM_KINDS):
        known = next((key for key in stand_ins(*kind) if key in found), None)
        if known is None and instead is not None:
            rows.append(instead[number])
            continue
        points = found[known or kind]
        at = np.array(sorted(points))
        kept = slice(-1, None) if prefers_warm else slice(None)
        times = np.array([np.mean(points[size][kept]) for size in sorted(points)])
        row = np.interp(np.log(sizes), np.log(at), np.log(times))
        rows.append(row + np.maximum(0.0, np.log(sizes / at[-1])))
    return np.array(rows)


def _attention_points(curves: Iterable[Curve], idle_s: float) -> dict[str, AttentionPoints]:
    groups: dict[str, list[Curve]] = {}
    for curve in _merged(curves):
        if curve.operation.startswith("attention_"):
            in_fp32 = FP32_ATTENTION if curve.dtype == "fp32" else ""
            groups.setdefault(curve.operation + in_fp32, []).append(curve)
    points = {}
    for name, found in groups.items():
        sizes = np.log2([(curve.shape[3], curve.shape[4]) for curve in found])
        # Under a mask every pair is computed; the points count a causal half of them.
        pairs = 2.0 if name.endswith("_masked") else 1.0
        rates = np.log([pairs * curve.flops / (curve.time_s - idle_s) for curve in found])
        points[name] = AttentionPoints(sizes, rates)
    return points


def _collective_points(curves: Iterable[Curve], idle_s: float) -> dict[str, tuple[Floats, Floats]]:
    """Bytes of the full buffers and seconds of each collective."""
    groups: dict[str, list[Curve]] = {}
    for curve in _merged(curves):
        if curve.operation in ("all_reduce", "all_gather", "reduce_scatter"):
            groups.setdefault(curve.operation, []).append(curve)
    return {
        name: (
            np.array([float(curve.bytes) for curve in found]),
            np.array([max(curve.time_s - idle_s, _SMALLEST_KERNEL_S) for curve in found]),
        )
        for name, found in groups.items()
    }
