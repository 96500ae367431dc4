"""Record every allocation and release of a traced step, by section."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.memory.groups import Place
from planner.memory.partial_sums import partial_sums_name
from runners.trace.symbols import dims, factor


@dataclass(slots=True)
class Allocation:
    """One storage that came into being during the step."""

    name: str
    op: str
    shape: list[str]
    dtype: str
    monomial: str
    coefficient_bytes: int
    place: Place
    kind: str = "activation"


@dataclass(frozen=True, slots=True)
class Event:
    """`allocation` was allocated (sign +1) or released (sign -1) at `place`."""

    place: Place
    sign: int
    allocation: Allocation


class Tape(TorchDispatchMode):
    """Watches operations on fake tensors; `place` and `module` are set from outside.

    Storages passed to `ignore` (parameters, buffers, inputs) are never counted. Gradients are added
    as autograd does it where nothing watches (`sums_in_place`).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = Place("embed")
        self.module = ""
        self.events: list[Event] = []
        self.live: dict[int, Allocation] = {}
        self._finalizers: dict[int, Any] = {}
        self._ignored: set[int] = set()

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave this tensor's storage out of the account."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    def mark_gradient(self, tensor: torch.Tensor) -> None:
        """Say that this tensor's storage has become a parameter's gradient."""
        allocation = self.live.get(tensor.untyped_storage()._cdata)
        if allocation is not None:
            allocation.kind = "gradients"

    def mark(self, monomial: str) -> None:
        """Note a moment from which a buffer exists whose size the tape cannot know."""
        allocation = Allocation(monomial, "mark", [], "", monomial, 1, self.place, "gradients")
        self.events.append(Event(self.place, +1, allocation))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_sum = func is torch.ops.aten.add.Tensor and self.place.in_backward
        if is_sum and sums_in_place(*args, **(kwargs or {})):
            return args[0]
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, str(func))
        if func in KERNEL_TEMPORARIES:  # alive beside the output
            self._temporary(self._describe(KERNEL_TEMPORARIES[func](*args), str(func)))
        if func is torch.ops.aten.sum.dim_IntList and (matrix := summed_matrix(args[0], args[1])):
            self._temporary(self._partial_sums(*matrix, args[0].element_size()))
        return out

    def _see(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or key in self._ignored or storage.nbytes() == 0:
            return
        allocation = self._describe(tensor, op)
        self.live[key] = allocation
        self.events.append(Event(self.place, +1, allocation))
        self._finalizers[key] = weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        allocation = self.live.pop(key)
        del self._finalizers[key]
        self.events.append(Event(self.place, -1, allocation))

    def _temporary(self, allocation: Allocation) -> None:
        self.events.append(Event(self.place, +1, allocation))
        self.events.append(Event(self.place, -1, allocation))

    def _partial_sums(self, rows: int, columns: int, element_bytes: int) -> Allocation:
        name = partial_sums_name(self.product(rows), self.product(columns), element_bytes)
        return Allocation(self.module, "sum", [], "float32", name, 4, self.place)

    def product(self, count: int) -> str:
        """Write a count as a product of dimensions and a number."""
        monomial, coefficient = factor(count)
        return "*".join(filter(None, (str(coefficient) if coefficient > 1 else "", monomial)))

    def _describe(self, tensor: torch.Tensor, op: str) -> Allocation:
        itemsize = tensor.element_size()
        monomial, coefficient = factor(tensor.untyped_storage().nbytes() // itemsize)
        return Allocation(
            name=self.module,
            op=op,
            shape=dims(tuple(tensor.shape)),
            dtype=str(tensor.dtype).removeprefix("torch."),
            monomial=monomial,
            coefficient_bytes=coefficient * itemsize,
            place=self.place,
        )


# How often a tensor and its storage are counted in a dispatch mode where nothing but autograd's
# buffer holds them: a view's base, a second buffer or a function's own variable change that.
_HELD_ONCE, _STORED_ONCE = 4, 2


def sums_in_place(held: Any, added: Any, alpha: float = 1) -> bool:
    """Whether an addition is autograd's sum of two gradients that needs no new tensor.

    Autograd adds to the gradient that came first where only its buffer holds that and its storage.
    In a dispatch mode it takes every tensor for a subclass and makes a new one instead (torch 2.11,
    torch/csrc/autograd/input_buffer.cpp, `accumulate` and `can_accumulate_inplace`).
    """
    if torch.is_grad_enabled() or not isinstance(added, torch.Tensor) or alpha != 1:
        return False
    if held.shape != added.shape or held.dtype != added.dtype:
        return False
    stored = torch._C._storage_Use_Count(held.untyped_storage()._cdata)
    return bool((held._use_count(), stored) == (_HELD_ONCE, _STORED_ONCE))


def summed_matrix(tensor: torch.Tensor, dims: Sequence[int] | None) -> tuple[int, int] | None:
    """Rows and columns of a sum over the slow dimensions of a dense tensor; None for other sums."""
    reduced = {dim % tensor.ndim for dim in dims or range(tensor.ndim)} if tensor.ndim else set()
    order = sorted((d for d in range(tensor.ndim) if tensor.shape[d] > 1), key=tensor.stride)
    kept = [dim for dim in order if dim not in reduced]
    if not kept or len(kept) == len(order) or order[: len(kept)] != kept:
        return None
    if tensor.stride(order[0]) != 1 or 0 in (tensor.stride(dim) for dim in order):
        return None
    columns = prod(tensor.shape[dim] for dim in kept)
    return tensor.numel() // columns, columns


# CUDA kernels that allocate a tensor no caller sees. aten/src/ATen/native/cuda/SoftMax.cu,
# softmax_backward_cuda_out: `Tensor tmp = grad * output`. aten/src/ATen/native/SoftMax.cpp,
# _safe_softmax: which scores are -inf.
KERNEL_TEMPORARIES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten._softmax_backward_data.default: lambda grad, output, dim, dtype: grad,
    torch.ops.aten._safe_softmax.default: lambda scores, dim: torch.empty_like(
        scores, dtype=torch.bool
    ),
}
