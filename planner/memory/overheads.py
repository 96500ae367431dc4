"""From allocated to reserved to device bytes: library workspaces, segments, context, NCCL."""

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
# Where the allocator is not replayed: on 50 measured steps reserved was 12 % above allocated on
# average (2 to 40 %).
TYPICAL_SEGMENT_SHARE = 0.12


def workspace_bytes(hardware: Gpu | None) -> int:
    """Bytes of cuBLAS workspaces, which the allocator counts as allocated."""
    capability = (hardware and hardware.compute_capability) or "9.0"
    is_older = int(capability.split(".")[0]) < 9 if capability[0].isdigit() else False
    return _WORKSPACES * (_OLDER_WORKSPACE_BYTES if is_older else _HOPPER_WORKSPACE_BYTES)


@dataclass(frozen=True, slots=True)
class Overheads:
    """What lies between the allocated peak and what the driver shows; values may be arrays."""

    segment_bytes: Any
    segment_formula: str
    nccl_bytes: Any
    reserved_bytes: Any
    device_bytes: Any

    @classmethod
    def estimated(
        cls, allocated_bytes: Any, world_size: Any, share: float = TYPICAL_SEGMENT_SHARE
    ) -> Overheads:
        """Take segments as a share of the allocated peak; both arguments may be arrays."""
        # A Python integer holds what absurd plans need, an array of 64-bit integers does not.
        if np.ndim(allocated_bytes) == 0:
            segment_bytes = round(allocated_bytes * share)
        else:
            segment_bytes = np.rint(allocated_bytes * share).astype(np.int64)
        formula = f"{share:.1%} of the allocated peak (estimate)"
        return cls._of(allocated_bytes, segment_bytes, world_size, formula)

    @classmethod
    def replayed(cls, allocated_bytes: int, reserved_bytes: int, world_size: int) -> Overheads:
        """Take segments from a replay of the caching allocator."""
        formula = (
            "held by the allocator without a tensor in it: its rules replayed over three steps"
        )
        return cls._of(allocated_bytes, reserved_bytes - allocated_bytes, world_size, formula)

    @classmethod
    def _of(
        cls, allocated_bytes: Any, segment_bytes: Any, world_size: Any, formula: str
    ) -> Overheads:
        reserved_bytes = allocated_bytes + segment_bytes
        nccl_bytes = (world_size > 1) * NCCL_BYTES
        return cls(
            segment_bytes=segment_bytes,
            segment_formula=formula,
            nccl_bytes=nccl_bytes,
            reserved_bytes=reserved_bytes,
            device_bytes=reserved_bytes + CONTEXT_BYTES + nccl_bytes,
        )

    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of a prediction's `overheads`, without those of no bytes."""
        rows = (
            ("segments", self.segment_bytes, self.segment_formula),
            ("context", CONTEXT_BYTES, "CUDA context and loaded kernels, measured on an H200"),
            (NCCL_OVERHEAD, self.nccl_bytes, "NCCL with two ranks, measured on two H200"),
        )
        return tuple({"name": n, "bytes": size, "formula": f} for n, size, f in rows if size)
