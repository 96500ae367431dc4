"""How quickly a process's host starts small pieces of work on its device, at the moment it is asked.

Steps whose GPU waits for the host take as long as the host needs, and a shared machine's host is slower
at one time than at another. A run that measured its own host's pace tells the moment from the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

# As many as a device's queue takes without letting the host wait: a module's backward starts two.
_LAUNCHES, _MODULES = 1000, 300
_WARMUPS, _REPETITIONS = 1, 5
_ELEMENTS = 64
_MICROSECONDS = 1e6


class _Scale(nn.Module):
    """One product of small tensors, as a module whose weight has a gradient."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_ELEMENTS, device=device))

    def forward(self, values: Tensor) -> Tensor:
        """Return `values` [elements] times the weight."""
        return values * self.weight


def measure_host_pace(
    device: torch.device, clock_s: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return microseconds of the host per piece of work that keeps no device busy: medians.

    `launch_us` starts an addition in place; `forward_us` calls a module that multiplies, with
    autograd; `backward_us` goes back through one. About 0.1 s in all.
    """
    small = torch.zeros(_ELEMENTS, device=device)
    chain = nn.Sequential(*(_Scale(device) for _ in range(_MODULES)))

    def launch() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1.0)

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = clock_s()
        result = work()
        return clock_s() - start_s, result

    laps = []
    for _ in range(_WARMUPS + _REPETITIONS):
        chain.zero_grad()
        launched_s, _ = timed(launch)
        forward_s, output = timed(partial(chain, small))
        backward_s, _ = timed(output.sum().backward)
        laps.append((launched_s, forward_s, backward_s))
    launched_s, forward_s, backward_s = map(median, zip(*laps[_WARMUPS:], strict=True))
    return {
        "launch_us": launched_s / _LAUNCHES * _MICROSECONDS,
        "forward_us": forward_s / _MODULES * _MICROSECONDS,
        "backward_us": backward_s / _MODULES * _MICROSECONDS,
    }
