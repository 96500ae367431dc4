"""What is measured around the phases of a run: bytes by four counters, and times."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.units import KIB_BYTES


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the `fraction` quantile of `values`, linear between neighbours."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def time_statistics(times_s: Sequence[float]) -> dict[str, float]:
    """Return median_s, p10_s, p90_s and n of `times_s`."""
    return {
        "median_s": statistics.median(times_s),
        "p10_s": quantile(times_s, 0.1),
        "p90_s": quantile(times_s, 0.9),
        "n": len(times_s),
    }


def host_peak_bytes() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB_BYTES


def device_used_bytes(device: torch.device) -> int:
    """Return what the driver says is in use on the device, by all processes, in bytes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def allocator_counters(device: torch.device) -> dict[str, int]:
    """Return the caching allocator's peaks since their last reset, and its failures.

    After a retry segments were given back: the reserved bytes at the end are below their peak.
    """
    statistics_ = torch.cuda.memory_stats(device)
    return {
        "end_reserved_bytes": statistics_["reserved_bytes.all.current"],
        "peak_active_bytes": statistics_["active_bytes.all.peak"],
        "num_alloc_retries": statistics_["num_alloc_retries"],
        "num_ooms": statistics_["num_ooms"],
    }


class Clock:
    """Timestamps on the device's stream, or on the host where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return a timestamp; on a GPU it is an event that has yet to happen."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two timestamps, waiting for the second."""
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


@dataclass(slots=True)
class PhaseBytes:
    """Allocated bytes of a phase: largest peak, and what is left at its last end."""

    peak_allocated_bytes: int = 0
    end_allocated_bytes: int = 0


@dataclass(slots=True)
class _Step:
    start: Any
    host_start_s: float
    end: Any = None
    host_s: float = 0.0
    phases: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)


class StepMeter:
    """Measures steps and their phases on one device.

    The allocator's peak is reset at every phase's start and the largest peak of a phase name is
    kept. Without a GPU there are no byte figures. `on_phase` is told of every phase's start.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = Clock(device)
        self._steps: list[_Step] = []
        self.bytes: dict[str, PhaseBytes] = {}
        self.reserved_peak_bytes = 0
        self.on_phase: Callable[[str], None] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step; phases inside it belong to it."""
        step = _Step(self._clock.now(), time.perf_counter())
        self._steps.append(step)
        yield
        step.end = self._clock.now()
        step.host_s = time.perf_counter() - step.host_start_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase: its time, if inside a step, and its allocated bytes."""
        if self.on_phase is not None:
            self.on_phase(name)
        start = self._clock.now()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self._read_allocator(name)
        if self._steps and self._steps[-1].end is None:
            self._steps[-1].phases.setdefault(name, []).append((start, self._clock.now()))

    def reset(self) -> None:
        """Forget all steps and phases; the reserved peak is the process's and stays."""
        self._steps.clear()
        self.bytes.clear()

    def step_times_s(self) -> list[float]:
        """Return each step's duration."""
        return [self._clock.seconds(step.start, step.end) for step in self._steps]

    def host_times_s(self) -> list[float]:
        """Return how long the host took to start each step's work, whether or not it is done.

        Where the device is behind, the host waits for room in its queue: then this is no more than
        a bound.
        """
        return [step.host_s for step in self._steps]

    def phase_times_s(self, name: str) -> list[float]:
        """Return each step's time in phase `name`, summed over its occurrences."""
        return [
            sum(self._clock.seconds(start, end) for start, end in step.phases.get(name, ()))
            for step in self._steps
        ]

    def _read_allocator(self, name: str) -> None:
        if self._device.type != "cuda":
            return
        phase = self.bytes.setdefault(name, PhaseBytes())
        # One reading, and not made flat and sorted: it happens within the steps that are timed.
        seen = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = seen["allocated_bytes"]["all"], seen["reserved_bytes"]["all"]
        phase.peak_allocated_bytes = max(phase.peak_allocated_bytes, allocated["peak"])
        phase.end_allocated_bytes = allocated["current"]
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, reserved["peak"])
