"""Triton device code that writes new keys and values into a cache, contiguous or paged."""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_row(new, cache, scales, inside, LARGEST: tl.constexpr, ROUNDS: tl.constexpr):
    """Store one row of D elements; with LARGEST scaled so that its largest is that."""
    values = tl.load(new, mask=inside, other=0.0)
    if LARGEST > 0:
        wide = values.to(tl.float32)
        scale = tl.max(tl.abs(wide), axis=0) / LARGEST
        wide = wide / tl.where(scale > 0, scale, 1.0)
        values = tl.floor(wide + 0.5) if ROUNDS else wide
        tl.store(scales, scale)
    tl.store(cache, values.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def append_kernel(
    k_new, v_new, k, v, lengths, table, k_scale, v_scale,
    k_new_strides, v_new_strides, k_strides, v_strides, k_scale_strides, v_scale_strides,
    table_stride, kv_heads, seq_q, capacity,
    PAGE: tl.constexpr, LARGEST: tl.constexpr, ROUNDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The key and the value of one new token of one head; a row of fewer tokens than new ones has
    none for the first of them. PAGE, table and strides are as in `decode_kernel`.
    """
    program = tl.program_id(0)
    head, token = (program % kv_heads).to(tl.int64), (program // kv_heads) % seq_q
    row = (program // kv_heads // seq_q).to(tl.int64)
    position = tl.load(lengths + row).to(tl.int64) - seq_q + token
    if (position >= 0) & (position < capacity):
        page, place = row, position
        if PAGE != 0:
            page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
            place = position % PAGE
        columns = tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        new = row * k_new_strides[0] + head * k_new_strides[1] + token * k_new_strides[2]
        at = page * k_strides[0] + head * k_strides[1] + place * k_strides[2]
        scale = page * k_scale_strides[0] + head * k_scale_strides[1] + place * k_scale_strides[2]
        _store_row(
            k_new + new + columns, k + at + columns, k_scale + scale, inside, LARGEST, ROUNDS
        )
        new = row * v_new_strides[0] + head * v_new_strides[1] + token * v_new_strides[2]
        at = page * v_strides[0] + head * v_strides[1] + place * v_strides[2]
        scale = page * v_scale_strides[0] + head * v_scale_strides[1] + place * v_scale_strides[2]
        _store_row(
            v_new + new + columns, v + at + columns, v_scale + scale, inside, LARGEST, ROUNDS
        )
