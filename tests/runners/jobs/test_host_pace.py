"""The host's pace: what one small piece of work takes, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runners.jobs.host_pace import measure_host_pace, measure_paced_steps

CPU = torch.device("cpu")
# Launches (1,000), modules forward (300) and backward (300) of a lap.
LAP = (0.004, 0.0045, 0.009)
SLOW = (0.008, 0.009, 0.018)


def clock_of(*taken_s: float) -> tuple[Callable[[], float], Callable[[], float | None]]:
    """A clock that goes so far between each two readings, and what is left of it."""
    readings = iter([reading for spent in taken_s for reading in (0.0, spent)])
    return (lambda: next(readings)), (lambda: next(readings, None))


def test_each_figure_is_the_median_time_of_one_piece_of_work() -> None:
    # The first lap warms up; of five others one is disturbed.
    clock, left = clock_of(9.0, 9.0, 9.0, *LAP, *LAP, 7.0, 8.0, 9.0, *LAP, *LAP)
    found = measure_host_pace(CPU, clock)
    assert found == pytest.approx({"launch_us": 4.0, "forward_us": 15.0, "backward_us": 30.0})
    assert left() is None


def test_a_paced_step_has_the_mean_of_the_laps_around_it() -> None:
    clock, left = clock_of(9.0, 9.0, 9.0, *LAP, 0.1, *LAP, 0.2, *SLOW, 0.3, *SLOW)
    steps: list[int] = []
    found = measure_paced_steps(lambda: steps.append(1), CPU, clock)
    first, second, third = found.pop("steps")
    assert found == pytest.approx({"launch_us": 6.0, "forward_us": 22.5, "backward_us": 45.0})
    assert first == pytest.approx(
        {"step_time_s": 0.1, "launch_us": 4.0, "forward_us": 15.0, "backward_us": 30.0}
    )
    assert second == pytest.approx(
        {"step_time_s": 0.2, "launch_us": 6.0, "forward_us": 22.5, "backward_us": 45.0}
    )
    assert (third["step_time_s"], third["forward_us"]) == pytest.approx((0.3, 30.0))
    assert (len(steps), left()) == (3, None)
