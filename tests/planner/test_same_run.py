"""Pairs of turns on one GPU: medians over both turns, busy and idle time apart, the mean of ratios."""

from __future__ import annotations

from typing import Any

import pytest

from planner.same_run import geometric_mean, same_run_pairs


def _row(engine: str, turn: int, steps_s: list[float], busy_s: float | None, pair: int = 0) -> Any:
    parallelism = {"engine": engine, "zero_stage": 3, "world_size": 8}
    plan = {"model": {"preset": "m"}, "workload": {}, "parallelism": parallelism}
    measured: dict[str, Any] = {
        "same_run": {"id": "r", "pair": pair, "turn": turn},
        "step_times_s": steps_s,
        "host_times_s": [0.5 * step_s for step_s in steps_s],
        "kernel_times": None if busy_s is None else [{"busy_s": busy_s}, {"busy_s": 99.0}],
    }
    return {"plan": plan}, measured


def test_a_pair_takes_the_median_over_both_turns() -> None:
    rows = [
        _row("peakmark", 0, [1.0, 2.0, 3.0], 1.0),
        _row("fsdp2", 1, [4.0, 4.0, 9.0], 3.0),
        _row("fsdp2", 2, [4.0, 5.0, 5.0], 4.0),
        _row("peakmark", 3, [2.0, 2.0, 8.0], 1.5),
    ]
    [pair] = same_run_pairs([*rows, ({"plan": {}}, {"step_times_s": [1.0]})])
    assert pair.place == ("fsdp2", 3, 8)
    # 1 2 2 2 3 8 and 4 4 4 5 5 9.
    assert (pair.ours.step_s, pair.peer.step_s, pair.ours.steps) == (2.0, 4.5, 6)
    assert pair.ratio == pytest.approx(2.0 / 4.5)
    assert (pair.ours.host_s, pair.peer.host_s) == (1.0, 2.25)
    assert (pair.ours.busy_s, pair.ours.idle_s) == (1.25, 0.75)
    assert (pair.peer.busy_s, pair.peer.idle_s) == (3.5, 1.0)
    assert pair.busy_ratio == pytest.approx(1.25 / 3.5)
    line = pair.to_dict()
    assert (line["model"], line["checkpointing"], line["ours_busy_ms"]) == ("m", "none", 1250.0)


def test_what_was_not_traced_has_no_busy_time() -> None:
    engines = ("peakmark", "fsdp2", "fsdp2", "peakmark")
    rows = [_row(engine, turn, [1.0], None) for turn, engine in enumerate(engines)]
    [pair] = same_run_pairs(rows)
    assert pair.ours.idle_s is None and pair.busy_ratio is None
    assert pair.to_dict()["peer_busy_ms"] is None


def test_a_pair_that_lacks_a_turn_is_left_out() -> None:
    assert same_run_pairs([_row("peakmark", 0, [1.0], None), _row("fsdp2", 1, [1.0], None)]) == []


def test_the_mean_of_ratios_is_geometric() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([0.9]) == pytest.approx(0.9)
