"""Host side of the fused Hopper backward: what it allocates, and its launches.

`kernels.attention.dispatch` decides whether a call may come here. Beside dq, dk and dv, which the
caller allocates, there live until `backward` returns:
- the dQ accumulator, fp32, B x Sq x Hq x D;
- lse and delta padded to whole tiles, fp32, 2 x B x Hq x (Sq rounded up to 128);
- a copy of dout if its strides are not what TMA takes (`tma_ready`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import hopper_backward_device as device
from kernels.attention import hopper_backward_rows as rows_device
from kernels.attention.dispatch import misalignment
from kernels.attention.hopper_common import GLUON_DTYPES, tile_descriptor
from kernels.attention.schedule import BackwardWork, bounded

ROW_PADDING = 128
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries per step, buffers of dS, whether registers are saved (FOLDED), registers per thread.

    dQ is one step late: it reads a buffer of dS while the groups write others.
    """

    queries: int
    ds_stages: int
    folded: bool
    registers: int


# By the columns of a tile. Measured on an H200 (S = 8,192): at 64 folding costs 15 %, and dP ahead 5 %;
# at 128 they make room for half of K in registers, which with a late dQ is 1.10 to 1.13 times as fast
# as neither, and for dP ahead, another 1.02 to 1.08.
TILES = {64: Tile(64, 3, False, 240), 128: Tile(64, 2, True, 240)}
KEYS = device.KEYS.value * device.GROUPS.value
# About twice as many as an H200 runs at once.
LAST_PROGRAMS = 256


def padded_head_dim(head_dim: int) -> int:
    """Return the columns of a tile, 64 or 128; TMA reads those past the head size as zero."""
    return 64 if head_dim <= 64 else 128


def interleaved_heads(heads: int, tiles: int, causal: bool) -> int:
    """Return how many of `heads` are dealt out together at the end, of `tiles` key tiles each.

    Under a causal mask a head's first tiles take longest: the last programs of the grid are ordered by
    length, so that all multiprocessors end together. Heads before them keep their queries in the L2
    cache one after another.
    """
    return min(heads, triton.cdiv(LAST_PROGRAMS, tiles)) if causal else 1


def temporary_bytes(batch: int, heads: int, seq_q: int, head_dim: int) -> int:
    """Return the bytes that live only inside `backward`, before the allocator's rounding."""
    rows = batch * heads
    padded = triton.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    return 4 * rows * seq_q * head_dim + 2 * 4 * rows * padded


def backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    left: int,
    right: int,
    scale: float,
) -> None:
    """Fill (dq, dk, dv) of attention for `inputs` (q, k, v) of the same shapes.

    q and dout are (B, Hq, Sq, D), k and v (B, Hkv, Sk, D), bf16 or fp16, D at most 128, no dimension
    empty, strides as `tile_descriptor` wants them; dout is copied where they are not. A query sees
    `left` keys before its own and `right` after it, UNBOUNDED for all: causal is a right of 0. dq lies in
    memory without gaps. lse (natural logarithm, -inf for a query that sees no key) and delta (row
    sums of out * dout, less dlse) are fp32 (B, Hq, Sq). dq can differ in its last bits between calls.
    """
    dq, dk, dv = gradients
    with torch.cuda.device(dq.device):
        folded = TILES[padded_head_dim(dq.shape[-1])].folded
        rows = _pad_rows(lse, delta, (-1.0 / scale, -1.0) if folded else (LOG2_E, 1.0))
        accumulator = torch.zeros_like(dq, dtype=torch.float32)
        _launch(inputs, tma_ready(dout), rows, (accumulator, dk, dv), left, right, scale)
        blocks = (triton.cdiv(dq.numel(), rows_device.SCALE_BLOCK),)
        rows_device.scale_kernel[blocks](
            accumulator, dq, scale, dq.numel(), BLOCK=rows_device.SCALE_BLOCK
        )


def tma_ready(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a contiguous copy if its address or strides are not what TMA takes."""
    layout = (tensor.shape, tensor.stride(), tensor.data_ptr(), tensor.element_size())
    return tensor.clone(memory_format=torch.contiguous_format) if misalignment(*layout) else tensor


def _pad_rows(lse: Tensor, delta: Tensor, factors: tuple[float, float]) -> Tensor:
    """Return (2, B * Hq, padded Sq) fp32: lse and delta, each times its factor.

    Where no key is seen and in the padding lse is +inf times its factor, and the padding of delta is 0:
    queries past the end weigh nothing.
    """
    batch, heads, seq_q = lse.shape
    padded = triton.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    rows = torch.empty((2, batch * heads, padded), dtype=torch.float32, device=lse.device)
    grid = (batch * heads * (padded // ROW_PADDING),)
    arguments = (lse.contiguous(), delta.contiguous(), rows, batch * heads, seq_q, padded, *factors)
    rows_device.pad_rows_kernel[grid](*arguments, BLOCK=ROW_PADDING)
    return rows


def _describe_row_values(values: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(values, [values.numel()], [1], [rows], layout)


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    rows: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    left: int,
    right: int,
    scale: float,
) -> None:
    """Fill dk, dv and the dQ accumulator (`gradients`, in the order dq, dk, dv)."""
    q, k, v = inputs
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    columns = padded_head_dim(head_dim)
    tile, half = TILES[columns], KEYS // 2
    left_bound, right_bound = bounded(seq_q, seq_k, left, right)
    work = BackwardWork(
        seq_q=seq_q, seq_k=seq_k, left=left_bound, right=right_bound, queries=tile.queries
    )
    has_left, has_right = work.left is not None, work.right is not None
    accumulator, dk, dv = gradients
    q_d, dout_d = (tile_descriptor(t, tile.queries, columns) for t in (q, dout))
    k_d, v_d, dk_d, dv_d = (tile_descriptor(t, half, columns) for t in (k, v, dk, dv))
    lse_d, delta_d = (_describe_row_values(values.view(-1), tile.queries) for values in rows)
    dq_d = tile_descriptor(accumulator, tile.queries, columns // 2)
    tiles = triton.cdiv(seq_k, KEYS)
    interleaved = interleaved_heads(batch * kv_heads, tiles, has_right and not has_left)
    bounds = (work.upper, work.lower)
    sizes = (seq_q, seq_k, kv_heads, heads // kv_heads, rows.shape[-1], interleaved, *bounds)
    device.backward_kernel[(batch * kv_heads * tiles,)](
        *(q_d, k_d, v_d, dout_d, lse_d, delta_d, dq_d, dk_d, dv_d),
        *(scale, scale * LOG2_E, *sizes),
        BM=tile.queries,
        D=columns,
        DS_STAGES=tile.ds_stages,
        FOLDED=tile.folded,
        RIGHT=has_right,
        LEFT=has_left,
        MASKED=has_right or has_left or seq_k % KEYS != 0,
        DS_LAYOUT=gl.NVMMASharedLayout.get_default_for([half, tile.queries], GLUON_DTYPES[q.dtype]),
        REGISTERS=tile.registers,
        num_warps=4,
    )
