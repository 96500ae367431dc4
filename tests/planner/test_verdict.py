"""Fits, tight or does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from planner.error_history import Interval
from planner.verdict import State, judge, judge_grid

GIB = 1_073_741_824


def _between(low: float, high: float) -> Interval:
    return Interval(
        low_bytes=round(low * GIB),
        high_bytes=round(high * GIB),
        measurements=48,
        basis="plans like it (peakmark, stage 3, sdpa)",
    )


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
def test_without_history_eight_percent_of_headroom_is_comfortable(
    needed: int, state: str, headroom: int
) -> None:
    verdict = judge(needed * GIB, 100 * GIB)
    assert verdict.state == state
    assert verdict.headroom_bytes == headroom * GIB
    assert verdict.headroom_fraction == pytest.approx(headroom / 100)
    assert judge_grid(np.array([needed * GIB]), 100 * GIB)[0] == state


@pytest.mark.parametrize(
    ("low", "needed", "high", "state"),
    [
        (90, 95, 100, "fits"),
        (90, 95, 100.5, "tight"),  # may be above
        (98, 98, 98, "fits"),
        (98.5, 98.5, 98.5, "tight"),  # surely below, with less than 2 % to spare
        (99, 101, 103, "tight"),  # may be below
        (100, 101, 103, "tight"),
        (100.5, 101, 103, "does_not_fit"),
    ],
)
def test_the_interval_decides(low: float, needed: float, high: float, state: str) -> None:
    verdict = judge(round(needed * GIB), 100 * GIB, _between(low, high))
    assert verdict.state == state
    ends = (np.array([end * GIB]) for end in (low, high))
    assert judge_grid(np.array([needed * GIB]), 100 * GIB, *ends)[0] == state


def test_the_sentence_says_how_much_is_left_or_missing() -> None:
    assert judge(75 * GIB, 100 * GIB).sentence == (
        "Fits: needs 75.00 GiB of 100.00 GiB per GPU, 25.0 % left."
    )
    assert judge(110 * GIB, 100 * GIB).sentence == (
        "Does not fit: needs 110.00 GiB of 100.00 GiB per GPU, 10.00 GiB too much."
    )
    assert judge(95 * GIB, 100 * GIB).sentence.startswith("Tight: ")


def test_the_sentence_says_what_the_interval_rests_on() -> None:
    assert judge(62 * GIB, 100 * GIB, _between(61.25, 63)).sentence == (
        "Fits: needs 62.00 GiB of 100.00 GiB per GPU, 38.0 % left; between 61.25 GiB and 63.00 GiB, "
        "from 48 measurements of plans like it (peakmark, stage 3, sdpa)."
    )


def test_a_grid_keeps_its_shape() -> None:
    states = judge_grid(np.array([[1, 95], [99, 101]]), 100)
    assert states.tolist() == [["fits", "tight"], ["tight", "does_not_fit"]]


def test_the_json_form_is_plain() -> None:
    data = judge(1, 2 * GIB, _between(0, 1)).to_dict()
    assert type(data["state"]) is str
    assert data["state"] == State.FITS
    assert (data["low_bytes"], data["high_bytes"], data["measurements"]) == (0, GIB, 48)
    assert judge(1, 2).to_dict()["low_bytes"] is None
