"""Repeats, their spread, and what they can tell; conditions that drifted or slowed a GPU down."""

from __future__ import annotations

from itertools import combinations
from statistics import stdev
from typing import Any

import pytest

from planner.experiments.conditions import cautions, clocks_of, drifts
from planner.experiments.groups import (
    Answer,
    Group,
    chance_of_separation,
    group_lines,
    judge_difference,
    spread_of,
)
from planner.experiments.lines import Line, SeenRun


def line(value: float | None, name: str = "r", outcome: str = "done", **more: Any) -> Line:
    environment = more.pop("environment", {})
    run = SeenRun(id=name, spec={}, outcome=outcome, measured={}, environment=environment)
    return Line(
        run=run,
        part="",
        variables={"engine": "peakmark", **more},
        figures={} if value is None else {"step time": value},
        outcome=outcome,
    )


def group(*values: float) -> Group:
    [found] = group_lines([line(value, f"r{i}") for i, value in enumerate(values)])
    return found


def test_the_spread_of_repeats_is_that_of_a_sample() -> None:
    found = spread_of([1.0, 2.0, 4.0, 9.0])
    assert (found.count, found.median, found.low, found.high) == (4, 3.0, 1.0, 9.0)
    assert found.variation == pytest.approx(stdev([1, 2, 4, 9]) / 4)
    assert spread_of([5.0]).variation is None
    assert spread_of([0.0, 0.0]).variation is None


def test_runs_of_one_spec_are_repeats_and_failed_ones_do_not_count() -> None:
    lines = [line(1.0), line(9.0, outcome="oom_device"), line(2.0, engine="fsdp2"), line(3.0)]
    groups = group_lines(lines)
    assert [len(one.lines) for one in groups] == [3, 1]
    assert groups[0].values("step time") == [1.0, 3.0]
    assert groups[0].spread("tokens per second") is None


@pytest.mark.parametrize(("first", "second"), [(2, 2), (3, 3), (4, 4), (3, 5)])
def test_the_chance_of_lying_apart_is_counted(first: int, second: int) -> None:
    total = first + second
    apart = 0
    shared = list(combinations(range(total), first))
    for own in shared:
        others = [i for i in range(total) if i not in own]
        apart += max(own) < min(others) or min(own) > max(others)
    assert chance_of_separation(first, second) == pytest.approx(apart / len(shared))


@pytest.mark.parametrize(
    ("before", "after", "answer", "words"),
    [
        ((1.0,), (2.0,), Answer.UNTOLD, "Both were run only once"),
        ((1.0, 1.1), (2.0,), Answer.UNTOLD, "One of them was run only once"),
        (
            (1.0, 1.1),
            (2.0, 2.1),
            Answer.LIKELY,
            "2 and 2 runs lie apart, which equal ones do in 33 %",
        ),
        ((1.0, 1.1, 1.2), (2.0, 2.1, 2.2), Answer.LIKELY, "10 % of cases"),
        ((4, 4.1, 4.2, 4.3), (1, 2, 3, 3.9), Answer.REAL, "4 and 4 runs lie apart"),
        ((1.0, 2.0), (1.5, 3.0), Answer.OVERLAP, "The ranges of 2 and 2 runs overlap"),
        ((7, 7), (7, 7, 7), Answer.EQUAL, "All of 3 and 2 runs measured the same"),
    ],
)
def test_a_difference_is_real_only_where_repeats_can_tell(
    before: tuple[float, ...], after: tuple[float, ...], answer: Answer, words: str
) -> None:
    found = judge_difference(group(*before), group(*after), "step time")
    assert found.answer is answer
    assert words in found.sentence


def test_what_was_not_measured_cannot_be_told() -> None:
    [failed] = group_lines([line(None, outcome="failed")])
    found = judge_difference(group(1.0, 2.0), failed, "step time")
    assert (found.answer, found.ratio) == (Answer.UNTOLD, None)
    assert judge_difference(group(2.0, 4.0), group(6.0, 6.0), "step time").ratio == 2.0


def environment(**gpu: Any) -> dict[str, Any]:
    values = {
        "name": "NVIDIA H200",
        "driver": "580",
        "sm_clock_mhz": 1980,
        "max_sm_clock_mhz": 1980,
    }
    return {"gpu": {**values, **gpu}, "versions": {"torch": "2.11.0", "triton": "3.6.0"}}


def test_environments_that_drifted_are_named_with_their_counts() -> None:
    same = [line(1.0, name, environment=environment()) for name in "ab"]
    assert drifts(same) == []
    other = environment(driver="590")
    other["versions"]["torch"] = "2.12.0"
    found = drifts([*same, line(1.0, "c", environment=other)])
    assert [drift.words() for drift in found] == [
        "driver: 580 (2), 590 (1)",
        "torch: 2.11.0 (2), 2.12.0 (1)",
    ]
    # A run's variants share its environment: it counts once.
    assert drifts([*same, *(line(1.0, "c", environment=other) for _ in range(3))]) == found
    missing = {**environment(), "versions": {"torch": "2.11.0"}}
    assert [d.words() for d in drifts([same[0], line(1.0, "d", environment=missing)])] == [
        "triton: 3.6.0 (1), unknown (1)"
    ]


def test_a_lowered_clock_is_told_with_its_reason() -> None:
    slowed = environment(sm_clock_mhz=1680, throttle_reasons=["sw_power_cap", "hw_thermal"])
    clocks = clocks_of(slowed)
    assert clocks.is_throttled
    assert clocks.words() == (
        "1,680 of 1,980 MHz, at its power limit, too hot, slowed by the hardware"
    )
    assert not clocks_of(environment(throttle_reasons=[])).is_throttled
    assert clocks_of({"gpu": None}).words() == ""
    cool, hot = line(1.0, "a", environment=environment()), line(2.0, "b", environment=slowed)
    assert cautions([cool], [hot], "step time") == [
        "GPUs with lowered clocks in 1 of 1 runs here and 0 of 1 of the baseline"
    ]
    assert cautions([cool], [hot], "allocated") == []


def test_worlds_that_are_not_honest_for_time_are_named() -> None:
    alone = line(1.0, world="solo", ranks=2)
    shared = line(1.0, world="shared", ranks=2)
    assert cautions([alone], [shared], "step time") == [
        "times in the world shared are not those of a GPU per rank",
        "a rank alone (solo) waits for no other: its time is without communication",
    ]
    assert (
        cautions([line(1.0, world="solo", ranks=1)], [line(1.0, world="nccl")], "step time") == []
    )
