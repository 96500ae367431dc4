"""One point that `calibrate` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runners.jobs.host_pace import measure_host_pace
from runners.jobs.stopwatch import Stopwatch, Work

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Prepare = Callable[[torch.device], Work]
_PACES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point to measure: `prepare` makes the tensors and returns the work on them."""

    group: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    flops: float
    prepare: Prepare

    @property
    def measured_operation(self) -> str:
        """What was measured, once it was."""
        return self.operation

    def times_s(self, watch: Stopwatch, device: torch.device) -> list[float]:
        """Measure it on the device's stream."""
        return watch.device_times_s(self.prepare(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCase(Case):
    """A point that the host's clock measures: `calls` in a row, waiting for each or for none."""

    calls: int = 1
    waits: bool = False

    def times_s(self, watch: Stopwatch, device: torch.device) -> list[float]:
        """Measure it on the host's clock."""
        return watch.host_times_s(self.prepare(device), calls=self.calls, waits=self.waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedCase(Case):
    """A point of work without a pause: a GPU at its power limit lowers its clock by then."""

    lasts_s: float = 0.4

    def times_s(self, watch: Stopwatch, device: torch.device) -> list[float]:
        """Measure the later half on the device's stream."""
        work = self.prepare(device)
        once_s = min(watch.device_times_s(work, cold=False, number=5))
        half = max(3, int(self.lasts_s / once_s / 2)) if device.type == "cuda" else 3
        for _ in range(half):
            work()
        return watch.together_times_s(work, half)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceCase(Case):
    """A figure of the host's pace, which is a median already."""

    figure: str

    def times_s(self, watch: Stopwatch, device: torch.device) -> list[float]:
        """Measure it anew each time."""
        return [measure_host_pace(device)[self.figure] / 1e6 for _ in range(_PACES)]
