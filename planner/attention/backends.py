"""Which kernel computes a call: what torch picks for `sdpa`, and which of ours runs."""

from __future__ import annotations

from planner.attention.problem import AttentionProblem, Variant
from planner.hardware import Gpu

_CUDNN_HEAD_DIM = 128
_HOPPER_FORWARD_HEAD_DIM, _HOPPER_BACKWARD_HEAD_DIM = 256, 128
FORWARD, BACKWARD = "forward", "backward"
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


def our_backend(problem: AttentionProblem, variant: Variant, gpu: Gpu, direction: str) -> str:
    """Return which of our kernels runs in one direction: hopper or triton.

    The rule of kernels/attention/dispatch.py, for contiguous tensors: hopper takes 16-bit calls on
    compute capability 9.0, full, causal and windowed ones.
    """
    is_hopper = gpu.compute_capability in ("9.0", None)
    takes_mask = variant in (Variant.TRITON, Variant.WINDOW)
    largest = _HOPPER_FORWARD_HEAD_DIM if direction == FORWARD else _HOPPER_BACKWARD_HEAD_DIM
    takes_head = problem.head_dim <= largest and problem.head_dim % 8 == 0
    takes = is_hopper and takes_mask and takes_head and problem.dtype != "fp32"
    return "hopper" if takes else "triton"


def _major(gpu: Gpu) -> int | None:
    """Return the compute capability's first number, None where the GPU is not NVIDIA's."""
    capability = gpu.compute_capability or "9.0"
    return int(capability.split(".")[0]) if capability[0].isdigit() else None
