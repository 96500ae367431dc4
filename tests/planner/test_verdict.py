"""Fits, tight or does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from planner.verdict import State, judge, judge_grid

GIB = 1_073_741_824


@pytest.mark.parametrize(
    ("needed", "state", "headroom"),
    [
        (0, "fits", 100),
        (92, "fits", 8),
        (93, "tight", 7),
        (100, "tight", 0),
        (101, "does_not_fit", -1),
    ],
)
def test_eight_percent_of_headroom_is_comfortable(needed: int, state: str, headroom: int) -> None:
    verdict = judge(needed * GIB, 100 * GIB)
    assert verdict.state == state
    assert verdict.headroom_bytes == headroom * GIB
    assert verdict.headroom_fraction == pytest.approx(headroom / 100)
    assert judge_grid(np.array([needed * GIB]), 100 * GIB)[0] == state


def test_the_sentence_says_how_much_is_left_or_missing() -> None:
    assert judge(75 * GIB, 100 * GIB).sentence == (
        "Fits: needs 75.00 GiB of 100.00 GiB per GPU, 25.0% left."
    )
    assert judge(110 * GIB, 100 * GIB).sentence == (
        "Does not fit: needs 110.00 GiB of 100.00 GiB per GPU, 10.00 GiB too much."
    )
    assert judge(95 * GIB, 100 * GIB).sentence.startswith("Tight: ")


def test_a_grid_keeps_its_shape() -> None:
    states = judge_grid(np.array([[1, 95], [99, 101]]), 100)
    assert states.tolist() == [["fits", "tight"], ["tight", "does_not_fit"]]


def test_the_json_form_is_plain() -> None:
    data = judge(1, 2).to_dict()
    assert type(data["state"]) is str
    assert data["state"] == State.FITS
