"""Times and peaks of kernels beside named peers, in one run: what every benchmark here prints.

Calls are timed in turns, in alternating order: only ratios inside one run mean something. Times
are medians over CUDA events, with the L2 cache flushed before each call. The GPU waits before each
until the host has started it, so that what the host needs is no part of the time: in a training step
or a CUDA graph it is not either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton

TRIALS, WINDOW_S, ROUNDS = 3, 0.05, 3
FEWEST_CALLS, MOST_CALLS = 5, 100
COPIED_VALUES = 1 << 28
# Larger than any L2 cache.
FLUSHED_BYTES = 1 << 28
# The GPU waits twice as long as the host needed, by the fastest clock that an H200 has.
HEAD_START, CYCLES_PER_S = 2.0, 2.0e9


def environment() -> dict[str, Any]:
    """Return what a figure depends on beside the code: device and versions."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def median_s(call: Callable[[], object]) -> float:
    """Return the median time of `call` on the GPU, its start by the host left out."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    call()
    host_s, device_s = min(_trial_s(call) for _ in range(TRIALS))
    wait_cycles = int(HEAD_START * host_s * CYCLES_PER_S)
    number = min(MOST_CALLS, max(FEWEST_CALLS, int(WINDOW_S / device_s)))
    marks = []
    for _ in range(number):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        torch.cuda._sleep(wait_cycles)
        start.record()
        call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def _trial_s(call: Callable[[], object]) -> tuple[float, float]:
    """Return how long the host took to start `call`, and how long until its work had ended."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    call()
    started_s = time.perf_counter()
    torch.cuda.synchronize()
    return started_s - start_s, time.perf_counter() - start_s


def times_in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return each call's median time over rounds that alternate their order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in reversed(list(calls)) if turn % 2 else calls:
            times[name].append(median_s(calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """Return how far allocated memory rises during `call`, which has run before."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return int(torch.cuda.max_memory_allocated() - before)


def copy_bytes_per_s() -> float:
    """Return the rate of a large copy on this device: bytes read and bytes written per second."""
    source = torch.randn(COPIED_VALUES, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source))


class Report:
    """Prints rows as they come and appends them, with the environment, to a JSON lines file."""

    def __init__(self, operation: str, path: Path | None) -> None:
        self._base = {"operation": operation, **environment()}
        self._path = path
        print(json.dumps(self._base), flush=True)

    def add(self, case: Mapping[str, Any], **figures: Any) -> None:
        """Report one case; `figures` are times in seconds, bytes and ratios."""
        shown = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in {**case, **figures}.items()
        }
        print(" ".join(f"{name}={value}" for name, value in shown.items()), flush=True)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({**self._base, **case, **figures}) + "\n")

    @contextmanager
    def surviving(self, case: Mapping[str, Any]) -> Iterator[None]:
        """Report an error of one case as its row, and go on."""
        try:
            yield
        except (RuntimeError, ValueError, AssertionError) as error:
            self.add(case, error=f"{type(error).__name__}: {error}"[:400])
            torch.cuda.empty_cache()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `exact`, in float64."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


def require(name: str, error: float, limit: float) -> None:
    """Raise RuntimeError for a result that is too far off to be timed (NaN is)."""
    if not error <= limit:
        raise RuntimeError(f"{name} errs by {error:.3g}, allowed {limit:.3g}")


def report_of(operation: str, arguments: Sequence[str] | None = None) -> Report:
    """Read a benchmark's command line and return its report; ends it where there is no GPU."""
    parser = argparse.ArgumentParser(description=f"Time kernels.{operation} beside its peers.")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    path: Path | None = parser.parse_args(arguments).json
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    return Report(operation, path)
