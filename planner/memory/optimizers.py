"""What an optimizer keeps of each tensor it steps, and what it holds for a moment in a step.

Read from torch 2.11 (torch/optim/adam.py, sgd.py, _adafactor.py, _muon.py) and bitsandbytes 0.50
(bitsandbytes/optim/optimizer.py). Sizes may be NumPy arrays over world sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from planner.memory.groups import GroupSizes, GroupTensors, PerLayer, group_tensors
from planner.model import ModelSpec
from planner.workload import Optimizer

_BF16_BYTES, _FP32_BYTES = 2, 4
_DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}
_NEWTON_SCHULZ_STEPS = 5
# bitsandbytes: smaller tensors keep fp32 states; each block of elements has a scale of its own; two
# tables of 256 fp32 values decode the bytes of all tensors of one optimizer.
_MIN_8BIT_NUMEL, _BLOCK_NUMEL, _TABLE_NUMEL = 4096, 256, 256
# These read rows and columns of a weight, so they cannot step a slice of a flat buffer.
WHOLE_MATRIX_OPTIMIZERS = (Optimizer.ADAFACTOR, Optimizer.MUON)


class Stepped(NamedTuple):
    """A tensor as the optimizer sees it: a parameter, or a flat shard of several."""

    shape: tuple[Any, ...]
    itemsize: int
    in_layer: bool = True

    @property
    def numel(self) -> Any:
        """Elements of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class State:
    """One state of one or more stepped tensors: `numel` elements of `itemsize` bytes."""

    name: str
    numel: Any
    itemsize: int

    @property
    def size_bytes(self) -> Any:
        """Bytes of all its elements."""
        return self.numel * self.itemsize

    @property
    def dtype(self) -> str:
        """Element type, as torch names it."""
        return _DTYPES[self.itemsize]


# A step's temporaries in order: (name, bytes) binds a name to a new tensor, which frees the one it
# was bound to only then, as an assignment does; 0 bytes only free.
Binding = tuple[Any, Any]


def stepped_groups(
    spec: ModelSpec, optimizer: Optimizer, flat_numels: GroupSizes, itemsize: int
) -> GroupSizes:
    """What a flat engine gives each group's optimizer: its buffer, or every parameter of it."""
    if optimizer not in WHOLE_MATRIX_OPTIMIZERS:
        return flat_numels.map(lambda numel: (Stepped((numel,), itemsize),))
    return whole_parameters(spec, itemsize)


@lru_cache(maxsize=64)
def whole_parameters(spec: ModelSpec, itemsize: int) -> GroupSizes:
    """Every parameter of each group in its own shape."""
    return as_stepped(group_tensors(spec), itemsize)


def as_stepped(shapes: GroupTensors, itemsize: int) -> GroupSizes:
    """Parameters of these shapes as an optimizer sees them."""

    def stepped(group: Sequence[tuple[int, ...]], in_layer: bool) -> tuple[Stepped, ...]:
        return tuple(Stepped(shape, itemsize, in_layer) for shape in group)

    return GroupSizes(
        embedding=stepped(shapes["embedding"], False),
        layers=PerLayer.of(shapes["layers"], lambda layer: stepped(layer, True)),
        head=stepped(shapes["head"], False),
    )


def is_orthogonalised(tensor: Stepped) -> bool:
    """Whether Muon steps it: matrices of the layers only; AdamW steps everything else."""
    return tensor.in_layer and len(tensor.shape) == 2


def tensor_states(optimizer: Optimizer, tensor: Stepped) -> tuple[State, ...]:
    """The states of one tensor, in the order of their allocation.

    SGD and Muon keep a momentum, AdamW two moments, Adafactor the means of a matrix's rows and
    columns (of a vector all squares), 8-bit AdamW bytes and their scales.
    """
    numel, itemsize = tensor.numel, tensor.itemsize
    if optimizer is Optimizer.ADAMW_8BIT:
        return _eight_bit_states(numel)
    if optimizer is Optimizer.ADAFACTOR:
        return _factored_states(tensor)
    if optimizer is Optimizer.SGD or (optimizer is Optimizer.MUON and is_orthogonalised(tensor)):
        return (State("momentum_buffer", numel, itemsize),)
    return (State("exp_avg", numel, itemsize), State("exp_avg_sq", numel, itemsize))


def _factored_states(tensor: Stepped) -> tuple[State, ...]:
    *outer, rows, columns = (1, *tensor.shape)
    if len(tensor.shape) == 1:
        return (State("variance", tensor.numel, tensor.itemsize),)
    matrices = prod(outer)
    return (
        State("row_var", matrices * rows, tensor.itemsize),
        State("col_var", matrices * columns, tensor.itemsize),
    )


def _eight_bit_states(numel: Any) -> tuple[State, ...]:
    is_small = numel < _MIN_8BIT_NUMEL
    blocks = (1 - is_small) * -(-numel // _BLOCK_NUMEL)
    return (
        *(State(f"state{i} (small tensors)", is_small * numel, _FP32_BYTES) for i in (1, 2)),
        *(State(f"state{i}", (1 - is_small) * numel, 1) for i in (1, 2)),
        *(State(f"absmax{i}", blocks, _FP32_BYTES) for i in (1, 2)),
    )


def optimizer_states(optimizer: Optimizer, tensors: Iterable[Stepped]) -> tuple[State, ...]:
    """The states of all tensors of one optimizer, summed by name."""
    numels: dict[tuple[str, int], Any] = {}
    for tensor in tensors:
        for state in tensor_states(optimizer, tensor):
            key = (state.name, state.itemsize)
            numels[key] = numels.get(key, 0) + state.numel
    for state in shared_states(optimizer):
        numels[state.name, state.itemsize] = state.numel
    return tuple(State(name, numel, itemsize) for (name, itemsize), numel in numels.items())


def shared_states(optimizer: Optimizer) -> tuple[State, ...]:
    """What one optimizer keeps once for all its tensors: 8-bit AdamW's two decoding tables."""
    if optimizer is not Optimizer.ADAMW_8BIT:
        return ()
    return tuple(State(f"qmap{i}", _TABLE_NUMEL, _FP32_BYTES) for i in (1, 2))


def optimizer_calls(
    optimizer: Optimizer, tensors: Sequence[Stepped]
) -> tuple[Sequence[Stepped], ...]:
    """The tensors of each call of a torch optimizer: Muon's are two, the second AdamW's."""
    if optimizer is not Optimizer.MUON:
        return (tensors,)
    muon = [tensor for tensor in tensors if is_orthogonalised(tensor)]
    return muon, [tensor for tensor in tensors if not is_orthogonalised(tensor)]


def state_words(optimizer: Optimizer, itemsize: int, master_bytes: int) -> str:
    """Say in words what a parameter's states and master copy take, for a formula."""
    master = f"{master_bytes} B of master weights + " if master_bytes else ""
    if optimizer is Optimizer.ADAMW_8BIT:
        return f"({master}2 x 1 B + 2 x 4 B per {_BLOCK_NUMEL})"
    if optimizer is Optimizer.ADAFACTOR:
        return f"({master}{itemsize} B per row and per column)"
    if optimizer is Optimizer.MUON:
        return f"({master}{itemsize} B in layer matrices, {2 * itemsize} B elsewhere)"
    count = 1 if optimizer is Optimizer.SGD else 2
    return f"{master_bytes + count * itemsize} B"


def keeps_step_on_device(optimizer: Optimizer, tensor: Stepped) -> bool:
    """Whether a tensor's step counter (one fp32 element) is on the GPU: fused AdamW only.

    What Muon leaves to AdamW is stepped by the fused one.
    """
    if optimizer is Optimizer.MUON:
        return not is_orthogonalised(tensor)
    return optimizer is Optimizer.ADAMW_FUSED


def casts_gradients(optimizer: Optimizer) -> bool:
    """Whether 16-bit gradients are cast for a step of fp32 values: only our own kernel reads both."""
    return optimizer is not Optimizer.ADAMW_TRITON


def step_temporaries(optimizer: Optimizer, tensors: Sequence[Stepped]) -> Iterator[Binding]:
    """What one call of the optimizer's `step` over `tensors` binds and frees, in order.

    Fused, 8-bit and our own AdamW update in one kernel, SGD with momentum in place: they bind nothing.
    Scalars are left out.
    """
    if optimizer is Optimizer.ADAMW_FOREACH:
        yield from (((("root", i), t.numel * t.itemsize)) for i, t in enumerate(tensors))
        yield from ((("root", i), 0) for i in range(len(tensors)))
    elif optimizer is Optimizer.ADAMW_LOOP:
        for tensor in tensors:
            yield "root", tensor.numel * tensor.itemsize
            yield "quotient", tensor.numel * tensor.itemsize
            yield "root", 0
        yield "quotient", 0
    elif optimizer is Optimizer.ADAFACTOR:
        yield from _adafactor_temporaries(tensors)
    elif optimizer is Optimizer.MUON:
        for tensor in filter(is_orthogonalised, tensors):
            yield from _muon_temporaries(tensor)
        yield "orthogonal", 0


def _adafactor_temporaries(tensors: Sequence[Stepped]) -> Iterator[Binding]:
    names = set()
    for tensor in tensors:
        states, itemsize = tensor_states(Optimizer.ADAFACTOR, tensor), tensor.itemsize
        for state in states:
            names.add(state.name)
            yield state.name, state.size_bytes  # the new means, or squares, that are blended in
        yield "update", tensor.numel * itemsize
    yield from ((name, 0) for name in (*sorted(names), "update"))


def _muon_temporaries(tensor: Stepped) -> Iterator[Binding]:
    """Newton and Schulz's iteration in bf16; the last tensor's result lives until its successor."""
    smaller = min(tensor.shape)
    gram_bytes, matrix_bytes = _BF16_BYTES * smaller**2, _BF16_BYTES * tensor.numel
    yield "blended", tensor.numel * tensor.itemsize
    yield "orthogonal", 0
    if tensor.itemsize != _BF16_BYTES:
        yield "iterate", matrix_bytes
    for step in range(_NEWTON_SCHULZ_STEPS):
        yield "gram", gram_bytes
        yield "gram_update", gram_bytes
        is_last = step == _NEWTON_SCHULZ_STEPS - 1
        yield ("orthogonal" if is_last else "iterate"), matrix_bytes
    yield from ((name, 0) for name in ("iterate", "gram", "gram_update", "blended"))


def temporaries_peak_bytes(optimizer: Optimizer, tensors: Sequence[Stepped]) -> Any:
    """The most that `step_temporaries` holds at once, in bytes; elementwise over arrays."""
    bound: dict[Any, Any] = {}
    live: Any = 0
    peak: Any = 0
    for name, size_bytes in step_temporaries(optimizer, tensors):
        live = live + size_bytes
        peak = np.maximum(peak, live) if np.ndim(live) else max(peak, live)
        live = live - bound.get(name, 0)
        bound[name] = size_bytes
    return peak
