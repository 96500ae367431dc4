"""SwiGLU, silu(gate) * up, fused: one kernel forward, one backward.

Kept for the backward: gate and up, which the layer holds anyway; silu(gate), which the plain chain
keeps beside them, is made again. The backward allocates the two gradients and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.launch import check_dtype, check_like, check_runs_here, launch
from kernels.swiglu import device as kernels

BLOCK = 2048


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, taken in fp32 and rounded once.

    Both have one shape (..., W) and one dtype of fp16, bf16, fp32. Any strides: halves of one tensor
    are read in place; what is not rows of adjacent elements is copied first. Raises ValueError naming
    the argument at fault.
    """
    if gate.dim() == 0:
        raise ValueError("gate has shape (); it must be (..., W)")
    if up.shape != gate.shape:
        raise ValueError(f"up has shape {tuple(up.shape)}; it must be gate's, {tuple(gate.shape)}")
    check_dtype("gate", gate)
    check_like("up", up, "gate", gate)
    rows = (_rows(tensor) for tensor in (gate, up))
    return swiglu_forward(*rows).view(gate.shape)


def _rows(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _grid(rows: Tensor) -> tuple[int]:
    return (len(rows) * triton.cdiv(rows.shape[1], BLOCK),)


@torch.library.custom_op("peakmark::swiglu_forward", mutates_args=())
def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows (N, W); the arguments are checked by `swiglu`."""
    check_runs_here("gate", gate)
    out = _like(gate)
    arguments = (gate, up, out, gate.stride(0), up.stride(0), gate.shape[1])
    launch(kernels.forward_kernel, _grid(gate), gate, arguments, BLOCK=BLOCK, num_warps=8)
    return out


def _like(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


@swiglu_forward.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _like(gate)


@torch.library.custom_op("peakmark::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dGate, dUp)."""
    check_runs_here("gate", gate)
    grad_gate, grad_up = _like(gate), _like(gate)
    strides = (tensor.stride(0) for tensor in (grad, gate, up))
    arguments = (grad, gate, up, grad_gate, grad_up, *strides, gate.shape[1])
    launch(kernels.backward_kernel, _grid(gate), gate, arguments, BLOCK=BLOCK, num_warps=8)
    return grad_gate, grad_up


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(gate)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return swiglu_backward(grad, *ctx.saved_tensors)


swiglu_forward.register_autograd(_backward, setup_context=_save_for_backward)
