"""What the Hopper kernels share: barrier rings, and tensor descriptors for the copy engine (TMA).

Device code is Gluon, for compute capability 9.0 alone; it has no interpreter.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@gluon.jit
def advance(index, phase, STAGES: gl.constexpr):
    """Step to the next slot of a ring; the phase flips when the index wraps."""
    index += 1
    if index == STAGES:
        index = 0
        phase ^= 1
    return index, phase


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """Allocate N barriers that each complete a phase after COUNT arrivals."""
    ring = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(ring.index(i), count=COUNT)
    return ring


def tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared layout of a (1, 1, rows, columns) tile: WGMMA can read it, TMA can fill it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], GLUON_DTYPES[dtype])


def tile_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a (B, H, S, D) tensor of any strides to TMA, in tiles of rows x columns.

    What a tile holds outside the tensor reads as zero and is not written. The last dimension must be
    contiguous, the address and the other strides multiples of 16 bytes (`kernels.attention.dispatch`
    checks this).
    """
    # TMA reads no stride of a dimension of size one, and torch allows any value there.
    strides = [
        stride if size > 1 else columns
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    layout = tile_layout(rows, columns, tensor.dtype)
    block = [1, 1, rows, columns]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, layout)
