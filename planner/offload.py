"""What an optimizer in host memory costs: bytes there, and time on the host's link and CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.hardware import Gpu
from planner.memory.offload import host_ledger, host_shards
from planner.memory.states import compute_bytes
from planner.model import ModelSpec
from planner.speed.calibrated import rates_of
from planner.units import format_bytes, format_rate, format_seconds
from planner.workload import Parallelism, TrainingWorkload

# AdamW reads value, gradient and both moments and writes all but the gradient, in fp32; before it
# the gradient is written in fp32, after it the value is read.
_ADAMW_FP32_PASSES = 7 + 1 + 1
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """A step of the optimizer on the host; values may be arrays over world sizes.

    Groups are stepped while others are copied, so the slower of both counts, and then the first
    copy there and the last one back.
    """

    link_s: Any
    update_s: Any
    ends_s: Any
    memory_bytes: Any
    threads: int

    @property
    def time_s(self) -> Any:
        """Seconds that the step takes."""
        return np.maximum(self.link_s, self.update_s) + self.ends_s

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return "host link" if float(self.link_s) > float(self.update_s) else "host memory"


def host_step(spec: ModelSpec, workload: TrainingWorkload, world_size: Any, gpu: Gpu) -> HostStep:
    """Return the time of max(copies, AdamW) + ends: updates as they were measured, bytes over the link's.

    The host is taken to have as many CPUs for each GPU as the measured one.
    """
    shards = host_shards(spec, workload, world_size)
    itemsize = compute_bytes(workload.precision)
    elements, longest = shards.total() * 1.0, shards.largest() * 1.0
    updates = rates_of(gpu).host_updates
    assert updates is not None  # the shipped curves have them
    link = gpu.host_link_bytes_s
    return HostStep(
        link_s=elements * itemsize / link,  # each way, at once
        update_s=shards.map(updates.update_s).total(),
        ends_s=2 * longest * itemsize / link,
        # Read out of one buffer and written into the other.
        memory_bytes=elements * (_ADAMW_FP32_PASSES * _FP32_BYTES + 2 * itemsize),
        threads=updates.threads,
    )


def offload_notes(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> tuple[str, ...]:
    """Say what offloading takes of the host, per GPU, and how long it holds up a step."""
    if not workload.offload_optimizer:
        return ()
    rows = host_ledger(spec, workload, parallelism)
    total_bytes = sum(row.size_bytes for row in rows)
    pinned = sum(row.size_bytes for row in rows if row.is_pinned)
    step = host_step(spec, workload, parallelism.world_size, gpu)
    return (
        f"The optimizer is in host memory: {format_bytes(total_bytes)} per GPU, of them "
        f"{format_bytes(pinned)} pinned (torch rounds each pinned buffer up to a power of two).",
        f"Offloading adds at least {format_seconds(float(step.time_s))} to a step, bound by the "
        f"{step.bound}: copies take {format_seconds(float(step.link_s))} each way at "
        f"{format_rate(gpu.host_link_bytes_s, 'B')}, AdamW {format_seconds(float(step.update_s))} "
        f"with {step.threads} threads, as measured on a host with 16 CPUs beside each GPU.",
    )
