"""Ranges of step times: order statistics by hand, and when a plan has one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.hardware import resolve_gpu
from planner.presets import resolve_model
from planner.speed.time_range import history_table, inside_without_itself, pace_of, range_around
from planner.throughput import training_throughput
from planner.workload import Parallelism, TrainingWorkload

MODEL = resolve_model("Qwen/Qwen2.5-0.5B")
H200 = resolve_gpu("h200")
# 1.00 to 1.39: the second smallest and the second largest of forty have 5 % beyond them.
FORTY = [("gpu", 1.0 + number / 100) for number in range(40)]


def test_a_step_is_told_by_what_sets_its_pace() -> None:
    assert [pace_of(1.0, host_s) for host_s in (0.5, 0.6, 1.0, 1.1)] == [
        "gpu",
        "both",
        "both",
        "host",
    ]


def test_bounds_leave_a_twentieth_of_further_steps_on_either_side() -> None:
    table = history_table([*FORTY, ("host", 2.0)])
    # One measurement says nothing of the next.
    assert table == {"gpu": {"n": 40, "low": 1.01, "high": 1.38}}


def test_each_step_is_asked_against_the_others() -> None:
    # Without itself a step is one of forty: the two at each end lie outside what the rest say.
    assert inside_without_itself(FORTY) == {"gpu": (36, 40), "both": (0, 0), "host": (0, 0)}


def test_a_plan_shows_the_range_of_steps_like_it() -> None:
    found = training_throughput(MODEL, TrainingWorkload(), Parallelism(world_size=1), H200)
    assert found.gpu_s is not None and found.host_s is not None and found.range_s is not None
    around = range_around(found.step_time_s, found.gpu_s, found.host_s)
    assert around is not None and found.range_s == (around.low_s, around.high_s)
    assert found.range_s[0] < found.step_time_s < found.range_s[1]
    assert around.sentence() in found.notes and str(around.measurements) in around.sentence()


@pytest.mark.parametrize(
    ("workload", "parallelism", "gpu"),
    [
        (TrainingWorkload(), Parallelism(world_size=1), resolve_gpu("h100-sxm5-80gb")),
        (replace(TrainingWorkload(), offload_optimizer=True), Parallelism(world_size=1), H200),
        (TrainingWorkload(), Parallelism(world_size=1, tensor_parallel=2), H200),
    ],
)
def test_what_was_not_measured_has_no_range(
    workload: TrainingWorkload, parallelism: Parallelism, gpu: object
) -> None:
    found = training_throughput(MODEL, workload, parallelism, gpu)  # type: ignore[arg-type]
    assert found.range_s is None
