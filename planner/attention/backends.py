"""Which kernel computes a call: what torch picks for `sdpa`, and which of ours runs."""

from __future__ import annotations

from planner.attention.problem import AttentionProblem, Variant
from planner.hardware import Gpu

_CUDNN_HEAD_DIM = 128
_OUR_HOPPER_HEAD_DIM = 128
_FIRST_FLASH_CAPABILITY = 8


def sdpa_backend(problem: AttentionProblem, gpu: Gpu) -> str:
    """Return the backend that torch picks: cudnn, flash, efficient or math.

    Rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.11): cuDNN first on
    Hopper and newer, flash from Ampere on, both in 16 bits; memory-efficient has no grouped heads;
    math stores the scores. A GPU of unknown kind counts as Hopper, another vendor's as flash.
    """
    grouped = problem.heads != problem.kv_heads
    if problem.dtype == "fp32":
        return "math" if grouped else "efficient"
    major = _major(gpu)
    if major is not None and major < _FIRST_FLASH_CAPABILITY:
        return "math" if grouped else "efficient"
    takes_cudnn = problem.head_dim <= _CUDNN_HEAD_DIM and problem.head_dim % 8 == 0
    return (
        "cudnn"
        if major is not None and major > _FIRST_FLASH_CAPABILITY and takes_cudnn
        else "flash"
    )


def our_backend(problem: AttentionProblem, variant: Variant, gpu: Gpu) -> str:
    """Return which of our kernels runs: hopper for full and causal 16-bit calls, else triton.

    The rule of kernels/attention/dispatch.py, for contiguous tensors, in both directions.
    """
    is_hopper = gpu.compute_capability in ("9.0", None)
    plain = is_plain(problem, variant)
    fits = problem.dtype != "fp32" and problem.head_dim <= _OUR_HOPPER_HEAD_DIM
    aligned = problem.head_dim % 8 == 0
    return "hopper" if is_hopper and plain and fits and aligned else "triton"


def is_plain(problem: AttentionProblem, variant: Variant) -> bool:
    """Whether our kernel is called with a full or causal mask; a window that hides nothing is one."""
    if variant is Variant.WINDOW:
        return problem.window >= problem.sequence_length
    return variant is Variant.TRITON


def _major(gpu: Gpu) -> int | None:
    """Return the compute capability's first number, None where the GPU is not NVIDIA's."""
    capability = gpu.compute_capability or "9.0"
    return int(capability.split(".")[0]) if capability[0].isdigit() else None
