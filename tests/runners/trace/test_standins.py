"""Stand-ins allocate and release what the operations do that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from planner.memory.groups import Place
from runners.trace.standins import _grouped_mm
from runners.trace.tape import Tape

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _real(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows, weights, offs=ends)


def _events(product: Product, recomputes: bool) -> list[tuple[int, list[str]]]:
    """What a product of 64 rows, among other operations, takes (+1) and gives back, by shape."""
    rows = torch.ones(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(4, 32, 48, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    tape = Tape()
    for tensor in (rows, weights, ends):
        tape.ignore(tensor)

    def experts(rows: torch.Tensor) -> torch.Tensor:
        return product(rows.sin(), weights, ends).cos()

    with tape:
        out = checkpoint(experts, rows, use_reentrant=False) if recomputes else experts(rows)
        tape.place = Place("layer_backward", 0)
        out.backward(torch.ones_like(out))
    return [(event.sign, event.allocation.shape) for event in tape.events]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_grouped_product_takes_and_gives_back_in_the_real_one_s_order(recomputes: bool) -> None:
    assert _events(_grouped_mm, recomputes) == _events(_real, recomputes)
