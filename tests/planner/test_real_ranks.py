"""Real ranks beside one alone: which rows belong together, and rates worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from planner.collective_times import are_calls_apart, collective_times_s
from planner.real_ranks import real_runs
from planner.records import Kind, RecordedRow, Role


def _row(
    world: str, minute: int, stage: int = 3, engine: str = "peakmark", **seen: Any
) -> RecordedRow:
    plan = {
        "model": {"preset": "m"},
        "parallelism": {"engine": engine, "zero_stage": stage, "world_size": 4},
    }
    return RecordedRow(
        id=f"{minute:016}",
        kind=Kind.TRAIN_STEP,
        recorded_at=datetime(2026, 1, 1, 0, minute, tzinfo=UTC),
        role=Role.EVIDENCE,
        spec={"kind": "train_step", "world": world, "plan": plan},
        outcome="done",
        measured=seen,
        environment={},
    )


def test_the_newest_row_of_each_plan_stands_beside_its_own_alone() -> None:
    old, new = _row("nccl", 1), _row("nccl", 3, losses=[1.0, 2.5])
    alone, other = _row("solo", 2), _row("solo", 4, stage=2)
    first = _row("nccl", 0, stage=0, losses=[1.0, 2.0])
    peer = _row("nccl", 5, engine="fsdp2", losses=[None, 2.0])
    found = real_runs([old, new, alone, other, first, peer])
    assert [run.row for run in found] == [first, new, peer]
    assert [run.alone for run in found] == [None, alone, None]
    assert [run.loss_distance for run in found] == [0.0, 0.5, None]
    assert [run.exposed_s for run in found] == [None, None, None]


def test_a_traced_run_stands_for_newer_ones_and_other_steps_are_not_compared() -> None:
    def row(minute: int, stage: int, warmup: int, **seen: Any) -> RecordedRow:
        made = _row("nccl", minute, stage=stage, **seen)
        return replace(made, spec={**made.spec, "warmup": warmup})

    first = row(0, 0, 3, losses=[3.0, 2.0])
    traced = row(1, 3, 3, losses=[3.0, 2.25], kernel_times=[{"exposed_s": 0.5}])
    later, loaded = row(2, 3, 3, losses=[1.0, 1.0]), row(3, 2, 3, losses=[1.0, 1.0])
    loaded = replace(loaded, spec={**loaded.spec, "load_from": "/kept"})
    longer = row(4, 1, 8, losses=[1.0, 1.0])
    found = real_runs([first, traced, later, loaded, longer])
    assert [run.row for run in found] == [first, longer, traced]
    assert [run.loss_distance for run in found] == [0.0, None, 0.25]


def test_ranks_are_apart_by_their_most_different_counter() -> None:
    ranks = [{"allocated_bytes": 5, "reserved_bytes": n, "device_bytes": None} for n in (9, 7)]
    first, second = real_runs([_row("nccl", 0, stage=1), _row("nccl", 1, per_rank=ranks)])
    assert (first.ranks_apart_bytes, second.ranks_apart_bytes) == (0, 2)


def test_losses_are_those_of_the_same_steps_as_the_lowest_stage_s() -> None:
    first = _row("nccl", 0, stage=1, losses=[3.0, 2.0, 1.0])
    # Two steps to warm up before: its first measured step is the third.
    later = _row("nccl", 1, stage=2, losses=[1.5, 0.0])
    later = replace(later, spec={**later.spec, "warmup": 2})
    assert [run.loss_distance for run in real_runs([first, later])] == [0.0, 0.5]


def test_of_every_call_the_rank_that_came_last_counts() -> None:
    ranks = [
        {"collectives": {"all_gather": {"time_s": 9.0, "times_s": [1.0, 8.0]}}},
        {"collectives": {"all_gather": {"time_s": 7.0, "times_s": [5.0, 2.0]}}},
    ]
    assert collective_times_s(ranks) == {"all_gather": 3.0} and are_calls_apart(ranks)
    ranks[0]["collectives"]["all_gather"]["times_s"] = [1.0]
    assert collective_times_s(ranks) == {"all_gather": 7.0} and not are_calls_apart(ranks)
    assert collective_times_s([]) == {}


def test_a_run_whose_calls_were_not_kept_apart_says_that_waits_are_in_its_times() -> None:
    gather = {"calls": 2, "time_s": 9.0}
    summed = [{"exposed_s": 0.0, "collectives": {"all_gather": gather}}] * 2
    apart = [
        {"exposed_s": 0.0, "collectives": {"all_gather": gather | {"times_s": [1.0, 8.0]}}}
    ] * 2
    rows = [_row("nccl", 0, stage=1), _row("nccl", 1, stage=2, kernel_times=summed)]
    found = real_runs([*rows, _row("nccl", 2, stage=3, kernel_times=apart)])
    assert [run.holds_waits for run in found] == [False, True, False]


def test_a_collective_takes_the_time_of_the_rank_that_waited_least() -> None:
    def rank(gather_s: float, exposed_s: float) -> dict[str, Any]:
        collectives = {
            "all_gather": {"calls": 3, "time_s": gather_s},
            "all_reduce": {"calls": 1, "time_s": 2.0},
        }
        return {"exposed_s": exposed_s, "collectives": collectives}

    sent = {
        "all_gather": {"calls": 3, "bytes": 800},
        "all_reduce": {"calls": 1, "bytes": 400},
        "reduce_scatter": {"calls": 1, "bytes": 4},
    }
    ranks = [rank(9.0, 0.5), rank(3.0, 0.25)]
    [run] = real_runs([_row("nccl", 1, communication=sent, kernel_times=ranks)])
    gather, reduce = run.collectives()
    assert (gather.collective, gather.calls, gather.time_s) == ("all_gather", 3, 3.0)
    # Three of four quarters of 800 bytes in 3 s; an all-reduce moves them twice.
    assert gather.bus_bytes_s == pytest.approx(200.0)
    assert reduce.bus_bytes_s == pytest.approx(2 * 300 / 2.0)
    assert run.exposed_s == 0.25
