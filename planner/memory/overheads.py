"""From allocated to reserved to device bytes: library workspaces, segments, context.

First version: segments are a fixed share, not a replay of the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.hardware import Gpu
from planner.units import KIB_BYTES, MIB_BYTES

NCCL_OVERHEAD = "nccl"
# cuBLAS keeps one workspace per thread that multiplies: the main thread and autograd's. Sizes by
# compute capability: aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize (torch 2.11):
# 4096 KiB x 8 = 32 MiB on Hopper and newer, 4096 x 2 + 16 x 8 KiB before.
_WORKSPACES = 2
_HOPPER_WORKSPACE_BYTES = 32 * MIB_BYTES
_OLDER_WORKSPACE_BYTES = 8 * MIB_BYTES + 128 * KIB_BYTES
# Bytes in use outside torch's segments, each from one recorded H200 row (driver 580,
# torch 2.11+cu130, NCCL 2.28.9) that is marked `calibration`: device less reserved bytes of a step
# on one rank, and what two NCCL ranks add to it.
CONTEXT_BYTES = 767 * MIB_BYTES
NCCL_BYTES = 842 * MIB_BYTES
# Blocks that the allocator holds in segments without a tensor in them: on 50 measured steps
# reserved was 12 % above allocated on average.
_SEGMENT_SHARE = 0.12


def workspace_bytes(hardware: Gpu | None) -> int:
    """Bytes of cuBLAS workspaces, which the allocator counts as allocated."""
    capability = (hardware and hardware.compute_capability) or "9.0"
    is_older = int(capability.split(".")[0]) < 9 if capability[0].isdigit() else False
    return _WORKSPACES * (_OLDER_WORKSPACE_BYTES if is_older else _HOPPER_WORKSPACE_BYTES)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What lies between the allocated peak and what the driver shows; values may be arrays."""

    segment_bytes: Any
    nccl_bytes: Any
    reserved_bytes: Any
    device_bytes: Any

    @classmethod
    def of(cls, allocated_bytes: Any, world_size: Any) -> Overheads:
        """Estimate from the allocated peak in bytes and the number of ranks."""
        # A Python integer holds what absurd plans need, an array of 64-bit integers does not.
        if np.ndim(allocated_bytes) == 0:
            segment_bytes = round(allocated_bytes * _SEGMENT_SHARE)
        else:
            segment_bytes = np.rint(allocated_bytes * _SEGMENT_SHARE).astype(np.int64)
        reserved_bytes = allocated_bytes + segment_bytes
        nccl_bytes = (world_size > 1) * NCCL_BYTES
        return cls(
            segment_bytes=segment_bytes,
            nccl_bytes=nccl_bytes,
            reserved_bytes=reserved_bytes,
            device_bytes=reserved_bytes + CONTEXT_BYTES + nccl_bytes,
        )

    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of a prediction's `overheads`, without those of no bytes."""
        segments = f"{_SEGMENT_SHARE:.0%} of the allocated peak (estimate)"
        rows = (
            ("segments", self.segment_bytes, segments),
            ("context", CONTEXT_BYTES, "CUDA context and loaded kernels, measured on an H200"),
            (NCCL_OVERHEAD, self.nccl_bytes, "NCCL with two ranks, measured on two H200"),
        )
        return tuple({"name": n, "bytes": size, "formula": f} for n, size, f in rows if size)
