"""A tape that reads sizes of a model's own and counts what its operations cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

import runners.trace.standins
from planner.memory.groups import Place
from runners.trace.own_sizes import OwnSizes
from runners.trace.tape import Allocation, Tape

PRODUCTS, ATTENTION, STREAMING = "products", "attention", "elementwise"
# Fused attention computes the scores once more in its backward: five products for two.
_FUSED_BACKWARD, _PRODUCT_BACKWARD = 2.5, 2.0
# (what kind of operation, "flops" or "bytes", powers of rows and tokens) -> number
Cost = Counter[tuple[str, str, int, int]]


def _matrix_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    return 2 * left.numel() * right.shape[-1]


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> int:
    """Products of queries with keys and of scores with values; without a mask of causal pairs."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return pairs * (q.shape[3] + v.shape[3]) * (1 if mask is None else 2)


_aten = torch.ops.aten
_PRODUCT_FLOPS: dict[Any, Callable[..., int]] = {
    _aten.mm.default: _matrix_flops,
    _aten.bmm.default: _matrix_flops,
    _aten.addmm.default: lambda bias, left, right: _matrix_flops(left, right),
    _aten.baddbmm.default: lambda bias, left, right: _matrix_flops(left, right),
}
_FUSED = torch.ops.peakmark_trace.attention_forward.default
# Grouped products are counted by themselves (`count_grouped`).
_MAKES_NOTHING = (
    *("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"),
    "peakmark_trace::grouped_forward",
)


class OwnTape(Tape):
    """Watches a model traced at its own dimensions; `costs` are by place."""

    def __init__(self, sizes: OwnSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.costs: dict[Place, Cost] = defaultdict(Counter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not _is_view(func) and func._schema.name not in _MAKES_NOTHING:
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
        if func is _FUSED:
            self._add_with_backward(ATTENTION, _attention_flops(*args[:4]), tensors)
            return
        kind = STREAMING
        if func in _PRODUCT_FLOPS:
            kind = PRODUCTS
            self._add(self.place, kind, "flops", _PRODUCT_FLOPS[func](*args[:3]))
        for tensor in tensors:
            self._add(self.place, kind, "bytes", _nbytes(tensor))

    def count_grouped(self, rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Count a grouped product, which is no single operation of the tape."""
        self._add_with_backward(PRODUCTS, _matrix_flops(rows, weights), [rows, weights, out])

    def _add_with_backward(self, kind: str, flops: int, tensors: list[torch.Tensor]) -> None:
        """Add an operation whose backward is written by hand: recomputed, it has no second one."""
        places = [(self.place, 1.0)]
        if not self.place.in_backward:
            times = _FUSED_BACKWARD if kind == ATTENTION else _PRODUCT_BACKWARD
            places.append((Place("layer_backward", self.place.layer), times))
        for place, times in places:
            self._add(place, kind, "flops", flops, times)
            for tensor in tensors:
                self._add(place, kind, "bytes", _nbytes(tensor), times)

    def _add(self, place: Place, kind: str, unit: str, count: int, times: float = 1.0) -> None:
        rows, tokens, rest = self._sizes.powers(count)
        self.costs[place][kind, unit, rows, tokens] += round(rest * times)

    def product(self, count: int) -> str:
        """Write a count as a product of rows, tokens and a number."""
        rows, tokens, rest = self._sizes.powers(count)
        return "*".join([str(rest), *["batch"] * rows, *["seq"] * tokens])

    def _describe(self, tensor: torch.Tensor, op: str) -> Allocation:
        itemsize, shape = tensor.element_size(), tuple(tensor.shape)
        numel = tensor.untyped_storage().nbytes() // itemsize
        monomial, coefficient = self._sizes.factor(numel, shape)
        return Allocation(
            name=self.module,
            op=op,
            shape=self._sizes.dims(shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            monomial=monomial,
            coefficient_bytes=coefficient * itemsize,
            place=self.place,
        )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@contextmanager
def counted_experts(tape: OwnTape) -> Iterator[None]:
    """Let `tape` count the grouped products of mixtures of experts."""
    stand_in = runners.trace.standins._grouped_mm

    def counting(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        out = stand_in(rows, weights, offs)
        tape.count_grouped(rows, weights, out)
        return out

    with mock.patch.object(runners.trace.standins, "_grouped_mm", counting):
        yield
