"""Which kernel computes an attention call: a pure rule, and what it chose last.

Both backends are exact and store no scores. `hopper` (Gluon) is for compute capability 9.0;
`triton` takes everything else. Nothing else is ever chosen: what neither can do is refused by
`flash_attention`'s own checks.

The rule can be overruled by the environment variable PEAKMARK_ATTENTION_BACKEND (auto, hopper,
triton) or, nearer, by `with forced_backend(...)`. Forcing `hopper` on a call that it cannot do
raises ValueError with the reason.

For a new direction or variant of the Hopper kernels: extend `obstacle`, and let the operator ask
before it launches, as `attention_forward` does by `takes_hopper_forward`: describe the call with
every tensor that TMA reads or writes (`problem_of`), then `pick(direction, problem)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from kernels.attention.schedule import single_tile

VARIABLE = "PEAKMARK_ATTENTION_BACKEND"
FIRST_GLUON = (3, 6)
TMA_BYTES = 16
MAX_STRIDE_BYTES = 2**40
MAX_TILES = 2**31
MAX_HEAD_DIM = 256
HOPPER_MASKS = ("full", "causal", "window")
MAX_BACKWARD_HEAD_DIM = 128


class Backend(StrEnum):
    """The kernels that can compute a call."""

    HOPPER = "hopper"
    TRITON = "triton"


class Direction(StrEnum):
    """The two halves of a training step; each is chosen on its own."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the rule looks at; everything in it is known before a kernel is launched.

    `mask` is the mask's kind; `plain` says that no softcap, sink or other variant changes the
    logits. `misaligned` names the first tensor that TMA cannot read, if any. `deterministic` says
    that torch is told to use deterministic algorithms.
    """

    capability: tuple[int, int] | None
    triton_version: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    mask: str
    plain: bool
    empty: bool
    tiles: int
    misaligned: str | None
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and why the Hopper kernels were not taken (None where they were)."""

    backend: Backend
    reason: str | None


def obstacle(problem: Problem) -> str | None:
    """Return why the Hopper forward cannot compute `problem`, or None."""
    widest = max(problem.head_dim, problem.value_head_dim)
    found = {
        "the device is not a Hopper GPU (compute capability 9.0)": problem.capability != (9, 0),
        "Triton is older than 3.6, which brings Gluon": problem.triton_version < FIRST_GLUON,
        f"its dtype is {problem.dtype}, not bfloat16 or float16": problem.dtype
        not in (torch.bfloat16, torch.float16),
        f"its head size {widest} is over {MAX_HEAD_DIM}": widest > MAX_HEAD_DIM,
        f"its mask is of kind {problem.mask}, not full, causal or window": problem.mask
        not in HOPPER_MASKS,
        "it has no element": problem.empty,
        f"it has {problem.tiles} tiles, over {MAX_TILES - 1}": problem.tiles >= MAX_TILES,
        f"{problem.misaligned} is not laid out in positive multiples of 16 bytes": problem.misaligned
        is not None,
    }
    return next((reason for reason, holds in found.items() if holds), None)


def backward_obstacle(problem: Problem) -> str | None:
    """Return why the Hopper backward cannot compute `problem`, or None."""
    if problem.head_dim > MAX_BACKWARD_HEAD_DIM:
        return f"its head size {problem.head_dim} is over {MAX_BACKWARD_HEAD_DIM}"
    if problem.value_head_dim != problem.head_dim:
        return "its values have another head size than its keys"
    if not problem.plain:
        return "its logits are changed by a softcap"
    if problem.deterministic:
        return "deterministic algorithms are asked for, and dQ is added up in no fixed order"
    return obstacle(problem)


def choose(
    problem: Problem, wanted: str = "auto", direction: Direction = Direction.FORWARD
) -> Choice:
    """Return the backend for `problem`; `wanted` is auto or a Backend.

    Raises ValueError if `wanted` is unknown, or is hopper and that cannot be done.
    """
    allowed = ("auto", *Backend)
    if wanted not in allowed:
        raise ValueError(f"{VARIABLE} is {wanted!r}; allowed are {', '.join(allowed)}")
    is_backward = direction is Direction.BACKWARD
    reason = backward_obstacle(problem) if is_backward else obstacle(problem)
    if wanted == Backend.TRITON:
        return Choice(Backend.TRITON, "triton was asked for")
    if reason is None:
        return Choice(Backend.HOPPER, None)
    if wanted == Backend.HOPPER:
        raise ValueError(
            f"the attention backend hopper cannot do this call: {reason}; ask for auto or triton"
        )
    return Choice(Backend.TRITON, reason)


def misalignment(
    shape: Sequence[int], strides: Sequence[int], address: int, element_bytes: int
) -> bool:
    """Say whether TMA cannot read a tensor: its last dimension must be contiguous, all else in 16 bytes.

    A dimension of size one may have any stride, an expanded one (stride 0) none.
    """
    if address % TMA_BYTES or (shape[-1] > 1 and strides[-1] != 1):
        return True
    steps = [
        stride * element_bytes for size, stride in zip(shape, strides, strict=True) if size > 1
    ]
    outer = steps[:-1] if shape[-1] > 1 else steps
    return any(step <= 0 or step % TMA_BYTES or step >= MAX_STRIDE_BYTES for step in outer)


def problem_of(tensors: dict[str, Tensor], *, mask: str, plain: bool) -> Problem:
    """Describe a call; `tensors` holds q, k and v, and whatever else TMA must read, by name."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    sizes = (min(tensor.shape[-1], MAX_HEAD_DIM) for tensor in (q, v))
    tiles = -(-q.shape[2] // single_tile(*sizes).rows) * q.shape[0] * q.shape[1]
    found = (
        name
        for name, t in tensors.items()
        if misalignment(t.shape, t.stride(), t.data_ptr(), t.element_size())
    )
    return Problem(
        capability=_capability(q.device),
        triton_version=_triton_version(),
        dtype=q.dtype,
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
        mask=mask,
        plain=plain,
        empty=q.numel() == 0 or k.numel() == 0,
        tiles=tiles,
        misaligned=next(found, None),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@lru_cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    """Return an NVIDIA GPU's compute capability, None for a CPU and for Triton's interpreter.

    AMD GPUs have numbers of the same form: an MI200 is 9.0 too.
    """
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return None
    return torch.cuda.get_device_capability(device)


@cache
def _triton_version() -> tuple[int, int]:
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


# Set by `forced_backend`. One for all threads: autograd runs a backward in a thread of its own.
_forced: list[str] = []
_ran: dict[Direction, Choice] = {}
_backends: dict[Direction, set[Backend]] = {direction: set() for direction in Direction}


@contextmanager
def forced_backend(backend: str) -> Iterator[None]:
    """Take `backend` (auto, hopper or triton) for every attention call inside, of all threads."""
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def pick(direction: Direction, problem: Problem) -> Backend:
    """Choose a backend for one direction, and remember the choice for `last_choice`."""
    wanted = _forced[-1] if _forced else os.environ.get(VARIABLE, "auto")
    _ran[direction] = choose(problem, wanted, direction)
    _backends[direction].add(_ran[direction].backend)
    return _ran[direction].backend


def takes_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: str, *, plain: bool
) -> bool:
    """Choose the backend of a forward call and say whether it is `hopper`."""
    problem = problem_of({"q": q, "k": k, "v": v, "out": out}, mask=mask, plain=plain)
    return pick(Direction.FORWARD, problem) is Backend.HOPPER


def takes_hopper_backward(tensors: dict[str, Tensor], mask: str, *, plain: bool) -> bool:
    """Choose the backend of a backward call and say whether it is `hopper`.

    `tensors` holds q, k, v and what gradients are written to, by name; dout may lie anyhow.
    """
    problem = problem_of(tensors, mask=mask, plain=plain)
    return pick(Direction.BACKWARD, problem) is Backend.HOPPER


def last_choice(direction: Direction) -> Choice | None:
    """Return what computed the latest call of this process in one direction, None before any."""
    return _ran.get(direction)


def chosen_backends() -> dict[str, list[str]]:
    """Return by direction every backend that computed a call of this process, in order of names."""
    return {direction.value: sorted(found) for direction, found in _backends.items()}
