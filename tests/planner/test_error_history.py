"""The interval around a prediction: order statistics worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from planner import error_history
from planner.error_history import (
    MEASURED_TRAITS,
    history_table,
    inside_without_itself,
    interval_around,
    ratios_by_stage,
    ratios_for,
)


def _traits(engine: str, stage: int, attention: str, **changes: str) -> dict[str, str]:
    usual = dict.fromkeys(MEASURED_TRAITS, "usual")
    return {**usual, "engine": engine, "stage": str(stage), "attention": attention, **changes}


SDPA = _traits("peakmark", 3, "sdpa")
EAGER = _traits("peakmark", 3, "eager")
OTHER = _traits("fsdp2", 3, "sdpa")


def _table(*plans: tuple[dict[str, str], float]) -> dict[str, Any]:
    groups: dict[str, Any] = history_table(plans)["groups"]
    return groups


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A history of 39 ratios of one kind of plan, 2 of another and 1 of another engine."""
    many = [(SDPA, 0.90 + 0.01 * index) for index in range(39)]
    table = history_table([*many, (EAGER, 1.0), (EAGER, 1.01), (OTHER, 1.5)])
    monkeypatch.setattr(error_history, "_history", lambda: table)
    yield table


def test_order_statistics_of_39_ratios() -> None:
    # 5 % of n + 1 = 40 is 2: the second smallest and the second largest.
    found = _table(*((SDPA, 0.90 + 0.01 * index) for index in range(39)))
    assert found["peakmark/3/sdpa"] == {"n": 39, "low": 0.91, "high": 1.27}
    assert found["extremes"] == {"n": 39, "low": 0.90, "high": 1.28}


def test_nineteen_ratios_give_their_extremes() -> None:
    found = _table(*((SDPA, 0.95 + 0.01 * index) for index in range(19)))
    assert found["peakmark/3/sdpa"] == {"n": 19, "low": 0.95, "high": 1.13}


def test_a_short_history_is_no_narrower_than_that_of_its_engine() -> None:
    plans = [(SDPA, 0.90 + 0.01 * index) for index in range(19)]
    found = _table(*plans, (EAGER, 1.0))
    assert found["peakmark/3/eager"] == {"n": 1, "low": 0.9, "high": 1.08}
    wide = _table(*plans, (EAGER, 1.3))
    assert wide["peakmark/3/eager"]["high"] == 1.3


def test_a_prediction_lies_in_its_own_interval() -> None:
    found = _table(*((SDPA, 1.1) for _ in range(30)))
    assert found["peakmark/3/sdpa"] == {"n": 30, "low": 1.0, "high": 1.1}


def test_where_the_bounds_come_from_is_said(history: dict[str, Any]) -> None:
    plans = (SDPA, EAGER, _traits("fsdp2", 2, "sdpa"))
    enough, few, lonely = (ratios_for(plan) for plan in plans)
    assert enough and few and lonely
    assert (enough.measurements, enough.basis) == (39, "plans like it (peakmark ZeRO-3, sdpa)")
    assert (few.measurements, few.basis) == (
        41,
        "plans of its engine (peakmark), 2 of them like it",
    )
    assert (lonely.measurements, lonely.basis) == (42, "all plans, 1 of them of its engine")


@pytest.mark.parametrize("trait", MEASURED_TRAITS)
def test_a_plan_unlike_all_measured_ones_gets_the_worst_of_them(
    history: dict[str, Any], trait: str
) -> None:
    found = ratios_for({**SDPA, trait: "new"})
    assert found is not None
    assert (found.measurements, found.low, found.high) == (42, 0.9, 1.5)
    assert found.basis == f"all plans, none of them with {trait} new"


def test_doubt_widens_both_ends(history: dict[str, Any]) -> None:
    found = interval_around(1000, SDPA, 50)
    assert found is not None
    assert (found.low_bytes, found.high_bytes) == (860, 1320)


def test_bounds_by_stage_are_those_of_single_plans(history: dict[str, Any]) -> None:
    found = ratios_by_stage(SDPA, (3, 2))
    assert found is not None
    singles = [ratios_for(_traits("peakmark", stage, "sdpa")) for stage in (3, 2)]
    assert np.array_equal(found[0], [single.low for single in singles if single])
    assert np.array_equal(found[1], [single.high for single in singles if single])


def test_each_ratio_is_held_to_the_bounds_of_the_others() -> None:
    # The others' extremes, 0.9 to 1.0 and 1.0 to 1.1, miss the lowest and the highest of four.
    plans = [(SDPA, ratio) for ratio in (0.9, 1.0, 1.05, 1.1)]
    assert inside_without_itself(plans) == 2
    # A lone plan of an architecture is unlike the others: nothing but their extremes is known.
    odd = _traits("peakmark", 3, "sdpa", architecture="new")
    # 1.2 widens what the highest of the four is held to, and lies outside itself.
    assert inside_without_itself([*plans, (odd, 1.2)]) == 3
    assert inside_without_itself([*plans, (odd, 1.02)]) == 3


def test_no_history_gives_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = history_table([])
    assert json.loads(json.dumps(empty)) == empty
    monkeypatch.setattr(error_history, "_history", lambda: empty)
    assert ratios_for(SDPA) is None
    assert interval_around(1000, SDPA, 0) is None
    assert ratios_by_stage(SDPA, (2, 3)) is None
