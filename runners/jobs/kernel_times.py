"""What the GPU did in one step, kernel by kernel: how long it was busy, and with which collectives."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL and the like.
_NCCL_KERNEL = re.compile(r"^nccl\w*?_(AllGather|AllReduce|ReduceScatter|Broadcast|Reduce)")
_COLLECTIVES = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
_SECONDS = 1e-6


def measure_kernels(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Run `step` once under the profiler, from an idle GPU to an idle GPU; see `summarize`.

    Adds `wall_s`, from the call to the GPU's end, and `host_s`, until the call returned; tracing
    makes both longer.
    """
    traced = trace(step, device, (ProfilerActivity.CUDA,))
    return {"wall_s": traced.wall_s, "host_s": traced.host_s, **summarize(traced.events)}


@dataclass(frozen=True, slots=True)
class Traced:
    """What a profiler saw: the events of its trace, and the seconds of host and of everything."""

    events: list[dict[str, Any]]
    host_s: float
    wall_s: float


def trace(
    step: Callable[[], object], device: torch.device, activities: Sequence[ProfilerActivity]
) -> Traced:
    """Run `step` once under the profiler, from an idle device to an idle device."""
    _settle(device)
    with profile(activities=activities) as profiler:
        start_s = time.perf_counter()
        step()
        host_s = time.perf_counter() - start_s
        _settle(device)
        wall_s = time.perf_counter() - start_s
    with tempfile.TemporaryDirectory(prefix="peakmark-trace-") as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return Traced(events, host_s, wall_s)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return figures of the device's work among the events of a trace (microseconds).

    `kernels` counts it and `busy_s` is how long anything ran. `collectives` holds calls, time_s and,
    call by call, times_s of each NCCL kernel, which begins when this rank does and so holds the wait
    for the others;
    `communication_s` is how long any of them ran, `exposed_s` how long nothing else did meanwhile.
    """
    work = [event for event in events if event.get("cat") in _DEVICE_WORK]
    work.sort(key=lambda event: float(event["ts"]))
    spans = [_span(event) for event in work]
    names = [_collective(str(event["name"])) for event in work]
    others = [span for span, name in zip(spans, names, strict=True) if name is None]
    sent = [span for span, name in zip(spans, names, strict=True) if name is not None]
    busy_s = covered(spans)
    return {
        "kernels": len(work),
        "busy_s": busy_s,
        "communication_s": covered(sent),
        "exposed_s": busy_s - covered(others),
        "collectives": {
            name: _calls([span for span, found in zip(spans, names, strict=True) if found == name])
            for name in sorted({name for name in names if name is not None})
        },
    }


def _calls(spans: Sequence[tuple[float, float]]) -> dict[str, Any]:
    times_s = [end - start for start, end in spans]
    return {"calls": len(spans), "time_s": sum(times_s), "times_s": times_s}


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start_s = float(event["ts"]) * _SECONDS
    return start_s, start_s + float(event["dur"]) * _SECONDS


def _collective(kernel: str) -> str | None:
    found = _NCCL_KERNEL.match(kernel)
    return None if found is None else _COLLECTIVES[found[1]]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `spans` (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
