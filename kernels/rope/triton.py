"""Rotary position embedding, fused: the query and the key are each read and written once.

Kept for the backward: cos and sin, which all layers share. The backward turns the gradients back, by
the same kernel with the transposed rotation, and allocates them and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.launch import check_dtype, check_like, check_runs_here, check_same_device, launch
from kernels.rope import device as kernels

MAX_HEAD_DIM = 512
# Elements of the turned half that one program holds: heads x half of the head size.
TILE = 2048


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k turned by their positions, as transformers' `apply_rotary_pos_emb`.

    q (B, Hq, S, D) and k (B, Hkv, S, D) have one dtype of fp16, bf16, fp32; cos and sin are (B or 1,
    S, R) with an even R of at most D, fp32 or that dtype; dimensions from R on stay. Arithmetic is in
    fp32 and rounded once. The results lie in memory as q and k do. cos and sin get no gradient.
    Raises ValueError naming the argument at fault.
    """
    for name, tensor in (("q", q), ("k", k)):
        _check_states(name, tensor)
    check_like("k", k, "q", q)
    if k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; all but its heads must be q's, {tuple(q.shape)}"
        )
    for name, tensor in (("cos", cos), ("sin", sin)):
        _check_angles(name, tensor, q)
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {tuple(sin.shape)}; it must be cos's, {tuple(cos.shape)}")
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    return rope(_rows(q), cos, sin, False), rope(_rows(k), cos, sin, False)


def _check_states(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be (B, H, S, D)")
    if not 2 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has head size {tensor.shape[-1]}; allowed are 2 to {MAX_HEAD_DIM}"
        )
    check_dtype(name, tensor)


def _check_angles(name: str, tensor: Tensor, q: Tensor) -> None:
    batch, _, seq, head_dim = q.shape
    turned = tensor.shape[-1] if tensor.dim() else 0
    fits = tensor.dim() == 3 and tensor.shape[0] in (1, batch) and tensor.shape[1] == seq
    if not fits or turned % 2 or not 2 <= turned <= head_dim:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; it must be ({batch} or 1, {seq}, R) with an even "
            f"R from 2 to {head_dim}"
        )
    check_dtype(name, tensor, (torch.float32, q.dtype))
    check_same_device(name, tensor, "q", q)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _like(x: Tensor) -> Tensor:
    """A (B, H, S, D) tensor with adjacent elements in the last dimension, laid out as x if dense."""
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def tile_options(num_heads: int, head_dim: int, turned: int) -> dict[str, int]:
    """Return the compile-time sizes of a launch: heads per program and padded halves."""
    half = max(1, triton.next_power_of_2(turned // 2))
    heads = min(triton.next_power_of_2(num_heads), max(1, TILE // half))
    rest = head_dim - turned
    return {
        "HALF": turned // 2,
        "HEAD_DIM": head_dim,
        "BLOCK_HEADS": heads,
        "BLOCK_HALF": half,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "num_warps": max(1, min(8, heads * half // 256)),
    }


@torch.library.custom_op("peakmark::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Turn x (B, H, S, D) by cos and sin, or back; the arguments are checked by `apply_rope`."""
    check_runs_here("q", x)
    out = _like(x)
    batch, heads, seq, head_dim = x.shape
    options = tile_options(max(heads, 1), head_dim, cos.shape[-1])
    grid = (batch * seq, triton.cdiv(heads, options["BLOCK_HEADS"]))
    strides = (x.stride()[:3], out.stride()[:3], _angle_strides(cos), _angle_strides(sin))
    arguments = (x, cos, sin, out, *strides, heads, seq)
    launch(kernels.rope_kernel, grid, x, arguments, BACKWARD=backward, **options)
    return out


def _angle_strides(angles: Tensor) -> tuple[int, int]:
    return (0 if angles.shape[0] == 1 else angles.stride(0)), angles.stride(1)


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    return _like(x)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.backward = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return rope(_rows(grad), *ctx.saved_tensors, not ctx.backward), None, None, None


rope.register_autograd(_backward, setup_context=_save_for_backward)
