"""How quickly a process's host starts small pieces of work on its device, at the moment it is asked.

Steps whose GPU waits for the host take as long as the host needs, and a shared machine's host is slower
at one second than at another. A run that measured its own host's pace tells the moment from the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

# As many as a device's queue takes without letting the host wait: a module's backward starts two.
_LAUNCHES, _MODULES = 1000, 300
_REPETITIONS, _PACED_STEPS = 5, 3
_ELEMENTS = 64
_MICROSECONDS = 1e6
_FIGURES = ("launch_us", "forward_us", "backward_us")


class _Scale(nn.Module):
    """One product of small tensors, as a module whose weight has a gradient."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_ELEMENTS, device=device))

    def forward(self, values: Tensor) -> Tensor:
        """Return `values` [elements] times the weight."""
        return values * self.weight


class HostPace:
    """Small pieces of work that keep no device busy, and how long the host takes to start one."""

    def __init__(
        self, device: torch.device, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._clock_s = device, clock_s
        self._small = torch.zeros(_ELEMENTS, device=device)
        self._chain = nn.Sequential(*(_Scale(device) for _ in range(_MODULES)))
        # The first time anything runs it takes longer.
        self.lap()

    def lap(self) -> dict[str, float]:
        """Return microseconds of the host per piece, in about 30 ms.

        `launch_us` starts an addition in place; `forward_us` calls a module that multiplies, with
        autograd; `backward_us` goes back through one.
        """
        self._chain.zero_grad()
        launched_s, _ = self.timed(self._launch)
        forward_s, output = self.timed(partial(self._chain, self._small))
        backward_s, _ = self.timed(output.sum().backward)
        taken_s = (launched_s / _LAUNCHES, forward_s / _MODULES, backward_s / _MODULES)
        return {name: one * _MICROSECONDS for name, one in zip(_FIGURES, taken_s, strict=True)}

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds until `work` returned, begun with an idle device, and its result."""
        self.settle()
        start_s = self._clock_s()
        result = work()
        return self._clock_s() - start_s, result

    def settle(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _launch(self) -> None:
        for _ in range(_LAUNCHES):
            self._small.add_(1.0)


def measure_host_pace(
    device: torch.device, clock_s: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the medians of several laps (`HostPace.lap`): 0.2 s in all."""
    pace = HostPace(device, clock_s)
    return _medians([pace.lap() for _ in range(_REPETITIONS)])


def measure_paced_steps(
    step: Callable[[], None],
    device: torch.device,
    clock_s: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Run `step` a few times, each from an idle device to an idle one and between two laps.

    Returns the laps' medians and, as `steps`, each step's `step_time_s` with the means of both laps.
    """
    pace = HostPace(device, clock_s)

    def whole() -> None:
        step()
        pace.settle()

    laps, steps = [pace.lap()], []
    for _ in range(_PACED_STEPS):
        seconds, _ = pace.timed(whole)
        laps.append(pace.lap())
        means = {name: (laps[-2][name] + laps[-1][name]) / 2 for name in _FIGURES}
        steps.append({"step_time_s": seconds, **means})
    return {**_medians(laps), "steps": steps}


def _medians(laps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(lap[name] for lap in laps) for name in _FIGURES}
