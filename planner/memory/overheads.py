"""From allocated to reserved to device bytes: library workspaces, segments, context.

First version: segments are a fixed share, not a replay of the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.hardware import Gpu
from planner.units import KIB_BYTES, MIB_BYTES

# cuBLAS keeps one workspace per thread that multiplies: the main thread and autograd's. Sizes by
# compute capability: aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize (torch 2.11):
# 4096 KiB x 8 = 32 MiB on Hopper and newer, 4096 x 2 + 16 x 8 KiB before.
_WORKSPACES = 2
_HOPPER_WORKSPACE_BYTES = 32 * MIB_BYTES
_OLDER_WORKSPACE_BYTES = 8 * MIB_BYTES + 128 * KIB_BYTES
# Measured on an H200 (driver 580, torch 2.11+cu130): bytes in use outside torch after the first
# matrix product, 684.8 MiB.
_CONTEXT_BYTES = 718_077_952
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
    context_bytes: int
    reserved_bytes: Any
    device_bytes: Any

    @classmethod
    def of(cls, allocated_bytes: Any) -> Overheads:
        """Estimate from the allocated peak in bytes."""
        # A Python integer holds what absurd plans need, an array of 64-bit integers does not.
        if np.ndim(allocated_bytes) == 0:
            segment_bytes = round(allocated_bytes * _SEGMENT_SHARE)
        else:
            segment_bytes = np.rint(allocated_bytes * _SEGMENT_SHARE).astype(np.int64)
        reserved_bytes = allocated_bytes + segment_bytes
        return cls(segment_bytes, _CONTEXT_BYTES, reserved_bytes, reserved_bytes + _CONTEXT_BYTES)

    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of a prediction's `overheads`."""
        return (
            {
                "name": "segments",
                "bytes": self.segment_bytes,
                "formula": f"{_SEGMENT_SHARE:.0%} of the allocated peak (estimate)",
            },
            {
                "name": "context",
                "bytes": self.context_bytes,
                "formula": "CUDA context and loaded kernels, measured on an H200",
            },
        )
