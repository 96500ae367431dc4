"""The time of one operation: medians, after warming up, with nothing warm in the GPU's cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from planner.units import MIB_BYTES

Work = Callable[[], object]
# Larger than any L2 cache: zeroed before each repetition.
_FLUSH_BYTES = 256 * MIB_BYTES
# The GPU waits that long (about 0.2 ms) before each repetition, so that the host, which starts the
# work meanwhile, is not part of the time.
_HEAD_START_CYCLES = 400_000
_WARMUPS = 2
_FEWEST, _MOST = 5, 20


class Stopwatch:
    """Times work on one device; `limit_s` bounds all repetitions of one operation."""

    def __init__(self, device: torch.device, limit_s: float = 0.06) -> None:
        self._device = device
        self._limit_s = limit_s
        is_cuda = device.type == "cuda"
        self._flushed = (
            torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if is_cuda else None
        )

    def device_times_s(
        self, work: Work, *, cold: bool = True, number: int | None = None
    ) -> list[float]:
        """Return the time of each repetition on the device's stream; `cold` empties the cache.

        `number` fixes the repetitions, as ranks must that work together.
        """
        fitting = self._repetitions(work)
        number = number or fitting
        if self._device.type != "cuda":
            return [self._host_time_s(work) for _ in range(number)]
        marks = []
        for _ in range(number):
            if cold and self._flushed is not None:
                self._flushed.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            marks.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in marks]

    def together_times_s(self, work: Work, number: int) -> list[float]:
        """Return the mean time of `number` repetitions without a pause, once for each."""
        if self._device.type != "cuda":
            return [self._host_time_s(work) for _ in range(number)]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(number):
            work()
        end.record()
        self.synchronize()
        return [start.elapsed_time(end) / 1000 / number] * number

    def host_times_s(self, work: Work, *, calls: int = 1, waits: bool = False) -> list[float]:
        """Return the host's time per call, over `calls` in a row; `waits` for the device each time."""
        number = self._repetitions(work)
        times_s = []
        for _ in range(number):
            self.synchronize()
            start_s = time.perf_counter()
            for _ in range(calls):
                work()
            if waits:
                self.synchronize()
            times_s.append((time.perf_counter() - start_s) / calls)
        self.synchronize()
        return times_s

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _repetitions(self, work: Work) -> int:
        """Warm up, and say how many repetitions the limit allows."""
        for _ in range(_WARMUPS):
            work()
        trial_s = median(self._host_time_s(work) for _ in range(2))
        return min(_MOST, max(_FEWEST, int(self._limit_s / max(trial_s, 1e-6))))

    def _host_time_s(self, work: Work) -> float:
        self.synchronize()
        start_s = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start_s
