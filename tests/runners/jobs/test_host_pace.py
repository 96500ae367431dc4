"""The host's pace: what one small piece of work takes, by a clock that the test sets."""

from __future__ import annotations

import pytest
import torch

from runners.jobs.host_pace import measure_host_pace


def test_each_figure_is_the_median_time_of_one_piece_of_work() -> None:
    # Start and end of launches (1,000), modules forward (300) and backward (300), six laps. The first
    # lap warms up; of the others one is disturbed.
    taken_s = [(9.0, 9.0, 9.0), *[(0.004, 0.0045, 0.009)] * 2, (7.0, 8.0, 9.0)]
    taken_s += [(0.004, 0.0045, 0.009)] * 2
    readings = [reading for lap in taken_s for spent in lap for reading in (0.0, spent)]
    clock = iter(readings)
    found = measure_host_pace(torch.device("cpu"), lambda: next(clock))
    assert found == pytest.approx({"launch_us": 4.0, "forward_us": 15.0, "backward_us": 30.0})
    assert next(clock, None) is None
