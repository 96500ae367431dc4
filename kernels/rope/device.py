"""Triton device code of the rotary embedding: one program turns some heads of one token."""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    x_strides,
    out_strides,
    cos_strides,
    sin_strides,
    num_heads,
    seq,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Pairs (a, b) = x[i], x[i + HALF]: out = a cos - b sin, b cos + a sin; BACKWARD: transposed.

    Dimensions from 2 HALF on are copied. cos and sin are read once for all heads of the program.
    """
    token = tl.program_id(0)
    batch, place = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    angles = columns < HALF
    cos += batch * cos_strides[0] + place * cos_strides[1]
    sin += batch * sin_strides[0] + place * sin_strides[1]
    cos_a = tl.load(cos + columns, mask=angles, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + HALF + columns, mask=angles, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + columns, mask=angles, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + HALF + columns, mask=angles, other=0.0).to(tl.float32)[None, :]
    x += batch * x_strides[0] + place * x_strides[2]
    out += batch * out_strides[0] + place * out_strides[2]
    from_row = x + heads.to(tl.int64)[:, None] * x_strides[1]
    to_row = out + heads.to(tl.int64)[:, None] * out_strides[1]
    inside = (heads < num_heads)[:, None] & angles[None, :]
    a = tl.load(from_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(from_row + HALF + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        new_a, new_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        new_a, new_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    element = out.dtype.element_ty
    tl.store(to_row + columns[None, :], new_a.to(element), mask=inside)
    tl.store(to_row + HALF + columns[None, :], new_b.to(element), mask=inside)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        inside = (heads < num_heads)[:, None] & (rest < HEAD_DIM)[None, :]
        kept = tl.load(from_row + rest[None, :], mask=inside, other=0.0)
        tl.store(to_row + rest[None, :], kept, mask=inside)
