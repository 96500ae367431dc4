"""Which moments of a section can be its highest."""

from __future__ import annotations

import numpy as np
import pytest

from planner.memory.sections import _undominated

HIDDEN, INNER = "batch*hidden*seq", "batch*inner*seq"
ENTRIES = [("activations", HIDDEN), ("temporary", HIDDEN), ("temporary", INNER)]


@pytest.mark.parametrize(
    ("live", "highest"),
    [
        ([], []),
        # By monomial (1, 0), (0, 1), (1, 1), (2, 0): the last two are beaten by none.
        ([[1, 0, 0], [0, 0, 1], [1, 0, 1], [2, 0, 0]], [2, 3]),
        # A monomial's bytes are those of all components; of equal moments the first is kept.
        ([[1, 1, 3], [2, 0, 3], [0, 2, 3]], [0]),
        ([[0, 0, 0], [-1, 0, 1], [3, -3, 0]], [0, 1]),
    ],
)
def test_moments_that_none_beats_in_every_monomial(
    live: list[list[int]], highest: list[int]
) -> None:
    moments = np.array(live, dtype=np.int64).reshape(len(live), len(ENTRIES))
    assert _undominated(moments, ENTRIES) == highest


def test_one_number_per_token_decides_no_peak() -> None:
    # Rounding hides it; where nothing else is alive, the first moment stands for all.
    moments = np.array([[5], [7]], dtype=np.int64)
    assert _undominated(moments, [("temporary", "batch*seq")]) == [0]
