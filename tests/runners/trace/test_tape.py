"""Which sums a tape takes for reductions over the rows of a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

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
