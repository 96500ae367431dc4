"""Statistics and the step meter."""

from __future__ import annotations

import time

import pytest
import torch

from runners.measure import StepMeter, host_peak_bytes, quantile, time_statistics


def test_quantiles_are_linear_between_neighbours() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.1) == pytest.approx(1.4)
    assert quantile([7.0], 0.9) == 7.0


def test_time_statistics_name_their_numbers() -> None:
    found = time_statistics([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert found == {"median_s": 6.0, "p10_s": 2.0, "p90_s": 10.0, "n": 11}


def test_phases_of_one_name_add_up_within_their_step() -> None:
    meter = StepMeter(torch.device("cpu"))
    with meter.phase("init"):
        pass
    for _ in range(2):
        with meter.step():
            for _ in range(2):
                with meter.phase("forward"):
                    time.sleep(0.01)
            with meter.phase("backward"):
                pass
    forward, step = meter.phase_times_s("forward"), meter.step_times_s()
    assert len(forward) == len(step) == 2
    assert all(0.02 <= inner <= outer for inner, outer in zip(forward, step, strict=True))
    assert meter.phase_times_s("backward")[0] < 0.01
    assert meter.bytes == {}
    meter.reset()
    assert meter.step_times_s() == []


def test_host_bytes_count_what_was_touched() -> None:
    before = host_peak_bytes()
    block = torch.ones(64 * 2**18)  # 64 MiB
    assert host_peak_bytes() >= before
    assert host_peak_bytes() > block.numel() * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_phase_peaks_are_the_allocators() -> None:
    device = torch.device("cuda:0")
    meter = StepMeter(device)
    base = torch.cuda.memory_allocated(device)
    with meter.phase("work"):
        kept = torch.empty(1024, dtype=torch.int8, device=device)
        torch.empty(4096, dtype=torch.int8, device=device)
    with meter.phase("work"):
        pass
    assert meter.bytes["work"].peak_allocated_bytes - base == 1024 + 4096
    assert meter.bytes["work"].end_allocated_bytes - base == kept.numel()
