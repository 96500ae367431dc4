"""Busy time and collectives out of a trace of one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runners.jobs.kernel_times import covered, summarize
from runners.jobs.train_step import LossLog


def _event(category: str, name: str, start_us: float, duration_us: float) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start_us, "dur": duration_us}


def test_overlapping_spans_count_once() -> None:
    assert covered([]) == 0.0
    assert covered([(3.0, 5.0), (0.0, 1.0), (4.0, 4.5), (4.0, 6.0)]) == 1.0 + 3.0


def test_a_step_is_split_in_computing_and_collectives() -> None:
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    scatter = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        {"ph": "M", "name": "process_name"},
        _event("cuda_runtime", "cudaLaunchKernel", 0, 900),
        _event("kernel", "gemm", 100, 100),
        # 50 us beside the product, then 30 us alone.
        _event("kernel", gather, 150, 80),
        _event("gpu_memset", "Memset", 300, 10),
        _event("kernel", scatter, 400, 20),
        _event("kernel", scatter, 420, 5),
    ]
    found = summarize(events)
    times = {name: one.pop("time_s") for name, one in found["collectives"].items()}
    assert times == pytest.approx({"all_gather": 80e-6, "reduce_scatter": 25e-6})
    scatters = found["collectives"]["reduce_scatter"].pop("times_s")
    assert scatters == pytest.approx([20e-6, 5e-6])
    assert found["collectives"]["all_gather"].pop("times_s") == pytest.approx([80e-6])
    assert found.pop("collectives") == {"all_gather": {"calls": 1}, "reduce_scatter": {"calls": 2}}
    assert found == pytest.approx(
        {"kernels": 5, "busy_s": 165e-6, "communication_s": 105e-6, "exposed_s": 55e-6}
    )


def test_losses_are_summed_over_the_micro_batches_of_each_step() -> None:
    log = LossLog(torch.device("cpu"))
    log.add(torch.tensor(9.0))
    log.clear()
    for value in (1.0, 2.0, float("inf"), 3.0):
        log.add(torch.tensor(value))
    assert log.sums(2) == [3.0, None]
    for _ in range(1100):
        log.add(torch.tensor(0.5))
    assert log.sums(4)[1:] == [2.0] * 275
