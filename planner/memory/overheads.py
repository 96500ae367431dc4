"""From allocated to reserved to device bytes: library workspaces, segments, context, NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.hardware import Gpu
from planner.memory.replay import Replayed
from planner.model import ModelSpec
from planner.units import KIB_BYTES, MIB_BYTES, format_share
from planner.workload import Attention, Engine, Precision, TrainingWorkload

NCCL_OVERHEAD = "nccl"
# cuBLAS keeps one workspace per thread that multiplies: the main thread and autograd's. Sizes by
# compute capability: aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize (torch 2.11):
# 4096 KiB x 8 = 32 MiB on Hopper and newer, 4096 x 2 + 16 x 8 KiB before.
_WORKSPACES = 2
_HOPPER_WORKSPACE_BYTES = 32 * MIB_BYTES
_OLDER_WORKSPACE_BYTES = 8 * MIB_BYTES + 128 * KIB_BYTES
# Bytes in use outside torch's segments on an H200 (driver 580, torch 2.11+cu130, NCCL 2.28.9), each
# from one recorded row that is marked `calibration`: device less reserved bytes of a step on one
# rank (1c2507ecdbc36aec), what the fused bf16 kernels of SDPA add (8284ade325cc72fb), what work on
# streams of its own adds (29cb8b7c8512fe38, FSDP2: always; our engine among several ranks), and what
# two NCCL ranks add (546e327316166a94). The last holds what the streams add: with NCCL all
# engines are measured alike.
_H200_CONTEXT_BYTES = 751 * MIB_BYTES
_FUSED_SDPA_BYTES = 16 * MIB_BYTES
_SIDE_STREAMS_BYTES = 70 * MIB_BYTES
_NCCL_PAIR_BYTES = 842 * MIB_BYTES
# A communicator of more than two ranks against one of two: 688 to 544 MB on A100 (NVIDIA/nccl issue
# 964). Others report 512 MiB for one rank (issue 2363) and 1.6 GB for a first one (issue 864).
_NCCL_MORE_RANKS = 688 / 544
_NCCL_DOUBT = 0.5
# What is published for other GPUs, without saying how much of it is kernels: 300 to 500 MB (Fujii
# et al.'s calculator) and 650 MB (gpu_poor). 400 MiB to either side of the H200's covers them.
_CONTEXT_DOUBT_BYTES = 400 * MIB_BYTES
# A served model: the context with fused attention kernels.
CONTEXT_BYTES = _H200_CONTEXT_BYTES + _FUSED_SDPA_BYTES
# Where the allocator is not replayed: on 50 measured steps reserved was 12 % above allocated on
# average (2 to 40 %).
TYPICAL_SEGMENT_SHARE = 0.12


def workspace_bytes(hardware: Gpu | None) -> int:
    """Bytes of cuBLAS workspaces, which the allocator counts as allocated."""
    capability = (hardware and hardware.compute_capability) or "9.0"
    is_older = int(capability.split(".")[0]) < 9 if capability[0].isdigit() else False
    return _WORKSPACES * (_OLDER_WORKSPACE_BYTES if is_older else _HOPPER_WORKSPACE_BYTES)


def attention_workspace_bytes(
    spec: ModelSpec, workload: TrainingWorkload, hardware: Gpu | None
) -> int:
    """Bytes that cuDNN's attention takes while its backward runs, on Hopper and newer; else 0.

    Gradients of queries in fp32; where heads share keys and values, those of each head's own; the
    rows' sums in fp32, and 256 (allocator snapshots of five plans on an H200, torch 2.11, cuDNN 9).
    """
    is_fused = workload.attention is Attention.SDPA and workload.precision is not Precision.FP32
    if not is_fused or workload.packed or workspace_bytes(hardware) != 2 * _HOPPER_WORKSPACE_BYTES:
        return 0
    rows = workload.micro_batch * workload.sequence_length * spec.num_heads
    shared = spec.num_heads != spec.num_kv_heads
    return rows * spec.head_dim * (4 + 2 * 2 * shared) + 4 * rows + 256


@dataclass(frozen=True, slots=True)
class Outside:
    """What a process holds outside torch's allocator; values may be arrays, for many ranks at once.

    `doubt_bytes`: how far the truth may lie to either side where nothing was measured for this GPU
    or this number of ranks.
    """

    context_bytes: Any
    context_formula: str
    nccl_bytes: Any
    nccl_formula: str
    doubt_bytes: Any


def outside_bytes(
    workload: TrainingWorkload, engine: Engine, ranks: Any, hardware: Gpu | None
) -> Outside:
    """Return context and communicator of one rank of `ranks` (an integer or an array of them)."""
    alone = _SIDE_STREAMS_BYTES * _has_side_streams(engine, ranks)
    fused = workload.attention is Attention.SDPA and workload.precision is not Precision.FP32
    measured = hardware is None or "h200" in f"{hardware.id} {hardware.name}".lower()
    # Booleans count as 0 and 1, in an array too.
    more = (ranks > 2) * (_NCCL_MORE_RANKS - 1)
    nccl = (ranks > 1) * (_NCCL_PAIR_BYTES * (1 + more) - alone)
    doubt = (ranks > 2) * nccl * _NCCL_DOUBT + (0 if measured else _CONTEXT_DOUBT_BYTES)
    place = "measured on an H200" if measured else "as on an H200, not measured on this GPU"
    return Outside(
        context_bytes=_whole(_H200_CONTEXT_BYTES + fused * _FUSED_SDPA_BYTES + alone),
        context_formula=f"CUDA context and loaded kernels, {place}",
        nccl_bytes=_whole(nccl),
        nccl_formula=_nccl_formula(ranks),
        doubt_bytes=_whole(doubt),
    )


def _has_side_streams(engine: Engine, ranks: Any) -> Any:
    if engine is Engine.PEAKMARK:
        return ranks > 1
    return engine is Engine.FSDP2


def _whole(size: Any) -> Any:
    return round(size) if np.ndim(size) == 0 else np.rint(size).astype(np.int64)


def _nccl_formula(ranks: Any) -> str:
    if np.ndim(ranks) == 0 and ranks <= 2:
        return "a communicator of two ranks, measured on two H200"
    return "a communicator of two ranks measured on two H200 x 688 / 544, as published for more"


@dataclass(frozen=True, slots=True)
class Overheads:
    """What lies between the allocated peak and what the driver shows; values may be arrays."""

    segment_bytes: Any
    segment_formula: str
    outside: Outside
    reserved_bytes: Any
    device_bytes: Any

    @classmethod
    def estimated(
        cls, allocated_bytes: Any, outside: Outside, share: float = TYPICAL_SEGMENT_SHARE
    ) -> Overheads:
        """Take segments as a share of the allocated peak, which may be an array."""
        # A Python integer holds what absurd plans need, an array of 64-bit integers does not.
        segment_bytes = _whole(allocated_bytes * share)
        formula = f"{format_share(share)} of the allocated peak (estimate)"
        return cls._of(allocated_bytes, segment_bytes, outside, formula)

    @classmethod
    def replayed(cls, allocated_bytes: int, replayed: Replayed, outside: Outside) -> Overheads:
        """Take segments from a replay of the caching allocator."""
        formula = (
            "held by the allocator without a tensor in it: its rules replayed over three steps"
        )
        if replayed.num_retries:
            formula += f"; memory is short, cached segments are given back {replayed.num_retries} x"
        segment_bytes = replayed.reserved_bytes - allocated_bytes
        return cls._of(allocated_bytes, segment_bytes, outside, formula)

    @classmethod
    def _of(
        cls, allocated_bytes: Any, segment_bytes: Any, outside: Outside, formula: str
    ) -> Overheads:
        reserved_bytes = allocated_bytes + segment_bytes
        return cls(
            segment_bytes=segment_bytes,
            segment_formula=formula,
            outside=outside,
            reserved_bytes=reserved_bytes,
            device_bytes=reserved_bytes + outside.context_bytes + outside.nccl_bytes,
        )

    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of a prediction's `overheads`, without those of no bytes."""
        outside = self.outside
        rows = (
            ("segments", self.segment_bytes, self.segment_formula),
            ("context", outside.context_bytes, outside.context_formula),
            (NCCL_OVERHEAD, outside.nccl_bytes, outside.nccl_formula),
        )
        return tuple({"name": n, "bytes": size, "formula": f} for n, size, f in rows if size)
