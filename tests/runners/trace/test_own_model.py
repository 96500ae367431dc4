"""Which layers of a model are alike, and how few of them stand for all."""

from __future__ import annotations

import pytest
from torch import nn

from planner.memory.kinds import contexts
from runners.trace.own_model import find_kinds, shortest_like


class Layer(nn.Module):
    def __init__(self, number: int, window: int | None, width: int = 4) -> None:
        super().__init__()
        self.layer_idx, self.window = number, window
        self.scale = 1.0 / (number + 1)
        self.linear = nn.Linear(width, width)


def test_layers_that_differ_in_their_number_only_are_alike() -> None:
    assert find_kinds(nn.ModuleList([Layer(i, None) for i in range(3)])) == ("plain",) * 3


def test_layers_of_other_settings_or_shapes_are_of_other_kinds() -> None:
    layers = [Layer(0, None), Layer(1, 8), Layer(2, None), Layer(3, None, width=6)]
    assert find_kinds(nn.ModuleList(layers)) == ("kind1", "kind2", "kind1", "kind3")


@pytest.mark.parametrize(
    ("kinds", "length"),
    [
        ("a" * 80, 4),
        ("abab" * 8, 4),
        ("aaab" * 9, 8),
        ("d" + "m" * 26, 5),
        ("aaab" * 9 + "aa", 10),
        ("abcdefgh", 8),
        ("a", 1),
    ],
)
def test_a_short_beginning_has_every_neighbourhood(kinds: str, length: int) -> None:
    assert shortest_like(kinds) == length
    assert set(contexts(kinds[:length])) == set(contexts(kinds))
