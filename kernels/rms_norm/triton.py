"""RMS norm over the last dimension, fused: one kernel forward, two backward.

Kept for the backward: x, weight and 4 bytes per row. The backward allocates dX, dW and, for dW, one fp32
row per program (a few per multiprocessor), which the second kernel sums in a fixed order: results
repeat to the bit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.launch import INTERPRETED, check_dtype, check_like, check_runs_here, launch
from kernels.rms_norm import device as kernels

MAX_WIDTH = 65536
# As many as its registers leave room for: more would wait, with a partial row each.
PROGRAMS_PER_MULTIPROCESSOR = 2
# Rows that a program of the backward loads ahead, and one.
STAGES = 3
# The tile of partial rows that a program of the second kernel adds up at once.
SUMMED_ROWS, SUMMED_COLUMNS = 64, 32


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, taken in fp32 and rounded once.

    x (..., W) and weight (W,) have one dtype of fp16, bf16, fp32; W is at most 65,536. Any strides;
    what is not rows of adjacent elements is copied first. Raises ValueError naming the argument at
    fault.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be x's last dimension, "
            f"{tuple(x.shape[-1:])}"
        )
    if not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"x has a last dimension of {x.shape[-1]}; allowed are 1 to {MAX_WIDTH}")
    check_dtype("x", x)
    check_like("weight", weight, "x", x)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps}; it must be a finite number of at least 0")
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rms_norm_forward(rows, weight.contiguous(), eps)[0].view(x.shape)


def row_options(width: int) -> dict[str, int]:
    """Return the launch options of a row of `width` elements: its tile and its warps."""
    block = max(16, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(max(1, block // 512), 32)}


def backward_programs(num_rows: int, multiprocessors: int) -> int:
    """Return how many programs share the rows of a backward: the rows of its dW buffer."""
    return min(num_rows, multiprocessors * PROGRAMS_PER_MULTIPROCESSOR)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED or device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@torch.library.custom_op("peakmark::rms_norm_forward", mutates_args=())
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (out, inverses) of rows x (N, W); the arguments are checked by `rms_norm`."""
    check_runs_here("x", x)
    rows, width = x.shape
    out, inverses = _outputs(x)
    arguments = (x, weight, out, inverses, x.stride(0), width, eps)
    launch(kernels.forward_kernel, (rows,), x, arguments, **row_options(width))
    return out, inverses


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, torch.empty(len(x), dtype=torch.float32, device=x.device)


@rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _outputs(x)


@torch.library.custom_op("peakmark::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverses: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (dX, dW) of `rms_norm_forward`."""
    check_runs_here("x", x)
    rows, width = x.shape
    programs = backward_programs(rows, _multiprocessors(x.device))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    arguments = (grad, x, weight, inverses, grad_x, partials)
    sizes = (grad.stride(0), x.stride(0), rows, width)
    options = row_options(width)
    launch(kernels.backward_kernel, (programs,), x, (*arguments, *sizes), STAGES=STAGES, **options)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    launch(
        kernels.weight_gradient_kernel,
        (triton.cdiv(width, SUMMED_COLUMNS),),
        x,
        (partials, grad_weight, programs, width),
        ROWS=SUMMED_ROWS,
        COLUMNS=SUMMED_COLUMNS,
        num_warps=4,
    )
    return grad_x, grad_weight


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, inverses: Tensor) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return grad_x, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2], output[1])


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return *rms_norm_backward(grad, *ctx.saved_tensors), None


rms_norm_forward.register_autograd(_backward, setup_context=_save_for_backward)
