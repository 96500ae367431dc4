"""Which sums a tape takes for reductions over the rows of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from planner.memory.groups import Place
from runners.trace.symbols import HIDDEN, PRIMES
from runners.trace.tape import Tape, summed_matrix


@pytest.mark.parametrize(
    ("shape", "order", "dims", "expected"),
    [
        ((6, 8), (0, 1), [0], (6, 8)),
        ((2, 3, 8), (0, 1, 2), [0, 1], (6, 8)),
        ((2, 3, 4, 8), (0, 1, 2, 3), [0, 1], (6, 32)),
        # Heads before tokens in the shape, behind them in memory: still rows of one head.
        ((2, 3, 4, 8), (0, 2, 1, 3), [0, 1, 2], (24, 8)),
        ((2, 3, 8), (0, 1, 2), [2], None),  # along the rows
        ((2, 3, 8), (0, 1, 2), [1], None),  # in the middle
        ((6, 8), (1, 0), [0], None),  # transposed
        ((6, 8), (0, 1), None, None),  # of everything
    ],
)
def test_a_sum_over_slow_dimensions_is_one_over_rows(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    dims: Sequence[int] | None,
    expected: tuple[int, int] | None,
) -> None:
    stored = torch.empty([shape[dim] for dim in order], device="meta")
    assert summed_matrix(stored.permute(*order), dims) == expected


def test_the_buffer_of_a_bias_gradient_lives_for_its_kernel() -> None:
    rows = torch.empty(PRIMES["batch"], PRIMES["seq"], HIDDEN, device="meta", dtype=torch.bfloat16)
    tape = Tape()
    with tape:
        total = rows.sum((0, 1))
    assert total.shape == (HIDDEN,)
    seen = [(event.sign, event.allocation.monomial) for event in tape.events]
    assert seen == [(1, "hidden"), (1, "sum:batch*seq:hidden:2"), (-1, "sum:batch*seq:hidden:2")]


WEIGHT = torch.ones(HIDDEN, HIDDEN)


def _projected(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(tensor, WEIGHT.to(tensor.device))


class _Twice(torch.autograd.Function):
    """Its backward adds two tensors of its own: no sum of autograd's."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        own = gradient * 1
        return own + gradient


Reader = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# What reads one tensor twice; the gradient of what was read later comes first.
READERS: dict[str, Reader] = {
    "both have a tensor of their own": lambda a, b: a.sin() * b.cos(),
    "the first to come is a product's view": lambda a, b: a.sin() * _projected(b),
    "only the second is a view": lambda a, b: _projected(a) * b.sin(),
    "both are views": lambda a, b: _projected(a) * _projected(b),
    "a residual's gradient has gone its other way": lambda a, b: (a + b.sin()) * 1,
    "one gradient comes by both ways": lambda a, b: (a + b) * 1,
    "a function sums by itself": lambda a, b: a.sin() * _Twice.apply(b),
}


class _Watched(torch.autograd.Function):
    """Notes where the gradient lies that passes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seen: list[int]) -> torch.Tensor:
        ctx.seen = seen
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.seen.append(gradient.data_ptr())
        return gradient, None


def _is_summed_in_place(reader: Reader) -> bool:
    """Let autograd sum on the CPU, unwatched: the sum lies where one of the two gradients lay."""
    arrived: list[int] = []
    summed: list[int] = []
    read = torch.ones(2, 3, HIDDEN, requires_grad=True) * 1
    read.register_hook(lambda gradient: summed.append(gradient.data_ptr()))
    out = reader(_Watched.apply(read, arrived), _Watched.apply(read, arrived))
    out.backward(torch.ones(out.shape))
    return summed[0] in arrived


def _new_sums(tape: Tape, reader: Reader) -> int:
    read = torch.ones(2, 3, HIDDEN, device="meta", requires_grad=True) * 1
    with tape:
        out = reader(read, read)
        tape.place = Place("layer_backward", 0)
        out.backward(torch.ones(out.shape, device="meta"))
    sums = [e for e in tape.events if e.sign > 0 and e.allocation.op == "aten.add.Tensor"]
    return sum(event.place.in_backward for event in sums)


@pytest.mark.parametrize("case", READERS)
def test_gradients_are_summed_in_place_where_autograd_does_unwatched(case: str) -> None:
    reader, own = READERS[case], int("by itself" in case)
    assert _new_sums(Tape(), reader) == own + (not _is_summed_in_place(reader))


def test_autograd_sums_in_place_what_its_buffer_alone_holds() -> None:
    in_place = [case for case, reader in READERS.items() if _is_summed_in_place(reader)]
    assert in_place == [
        "both have a tensor of their own",
        "only the second is a view",
        "a residual's gradient has gone its other way",
        "a function sums by itself",
    ]
