"""Triton device code of decode attention over a cache of one byte per element, fp8 (e4m3) or int8.

As `decode_kernel` in device.py, but a tile is kept as two in fp16, of its even and of its odd columns.
So two adjacent elements can be loaded, staged and transposed as one 16-bit word, which the loads for
tensor cores can do and bytes alone cannot, and be taken apart in registers two words at a time. Byte
by byte the kernel would be bound by that, not by memory.
"""

# ruff: noqa: N803, RET505 (compile-time arguments are upper case, as Triton code has them; and what
# stands behind a return without an else is compiled too)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode.device import (
    first_place,
    pages_of,
    places_from,
    rows_of,
    softmax_step,
    split_bounds,
    store_rows,
)


@triton.jit
def _halves(words, FP8: tl.constexpr, PACKED: tl.constexpr):
    """Return the low and the high bytes of 16-bit words as fp16, which holds both kinds exactly.

    PACKED: by instructions that convert two at a time (NVIDIA's).
    """
    if PACKED and FP8:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 bytes; .reg .b16 low, high; prmt.b32 bytes, $2, 0, 0x3120;"
            " mov.b32 {low, high}, bytes; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif PACKED:
        # 0x6400 + n is 1024 + n in fp16; the sign bit flipped, n is the value + 128.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 shifted, low, high, offset; xor.b32 shifted, $2, 0x80808080;"
            " prmt.b32 low, shifted, 0x64646464, 0x4240; prmt.b32 high, shifted, 0x64646464, 0x4341;"
            " mov.b32 offset, 0x64806480; sub.f16x2 $0, low, offset; sub.f16x2 $1, high, offset; }",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
        if FP8:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def _queries(base, strides, rows, known, group, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Load the group's even and odd columns in fp16, rows scaled by powers of two to below 2.

    Also returns the powers.
    """
    columns = 2 * tl.arange(0, HALF)
    heads, tokens = (rows % group).to(tl.int64), (rows // group).to(tl.int64)
    places = (heads * strides[1] + tokens * strides[2])[:, None] + columns[None, :]
    even = known[:, None] & (columns < HEAD_DIM)[None, :]
    odd = known[:, None] & (columns + 1 < HEAD_DIM)[None, :]
    low = tl.load(base + places, mask=even, other=0.0).to(tl.float32)
    high = tl.load(base + places + 1, mask=odd, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
    power = tl.exp2(tl.floor(tl.log2(tl.where(largest > 0, largest, 1.0))))
    return (low / power[:, None]).to(tl.float16), (high / power[:, None]).to(tl.float16), power


@triton.jit
def _columns(addresses, inside, WORDS: tl.constexpr, FP8: tl.constexpr, PACKED: tl.constexpr,
             HEAD_DIM: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Load the even and the odd columns of rows, (N, HALF) in fp16, zero outside.

    WORDS: addresses are of 16-bit words, one for both; else of bytes.
    """
    columns = tl.arange(0, HALF)
    if WORDS:
        wanted = inside[:, None] & (columns < HEAD_DIM // 2)[None, :]
        words = tl.load(addresses[:, None] + columns[None, :], mask=wanted, other=0)
        return _halves(words, FP8, PACKED)
    else:
        even = addresses[:, None] + 2 * columns[None, :]
        wanted = inside[:, None] & (2 * columns < HEAD_DIM)[None, :]
        low = tl.load(even, mask=wanted, other=0.0).to(tl.float16)
        wanted = inside[:, None] & (2 * columns + 1 < HEAD_DIM)[None, :]
        return low, tl.load(even + 1, mask=wanted, other=0.0).to(tl.float16)


@triton.jit
def _scales(scale, rows, inside, strides, head):
    """Load the scales of a tile's keys, which lie at `rows` of a head's."""
    return tl.load(scale + head * strides[1] + rows, mask=inside, other=0.0)


@triton.jit
def _add_values(even, odd, weights, low, high, scales, PER_TOKEN: tl.constexpr):
    """even, odd + weights @ even, odd columns of the values, each value times its scale."""
    if PER_TOKEN:
        # Weights times scales relative to the tile's largest stay within fp16's range.
        unit = tl.max(tl.abs(scales), axis=0)
        unit = tl.where(unit > 0, unit, 1.0)
        weights = (weights * (scales / unit)[None, :]).to(tl.float16)
        return even + tl.dot(weights, low) * unit, odd + tl.dot(weights, high) * unit
    else:
        weights = weights.to(tl.float16)
        return tl.dot(weights, low, even), tl.dot(weights, high, odd)


@triton.jit
def byte_kernel(
    q, k, v, out, lse, lengths, table,
    q_strides, k_strides, v_strides, out_strides, table_stride,
    kv_heads, group, seq_q, capacity, num_splits, window, scale_log2,
    k_scale, v_scale, k_scale_strides, v_scale_strides,
    WINDOWED: tl.constexpr, PAGE: tl.constexpr, PER_TOKEN: tl.constexpr, IS_SPLIT: tl.constexpr,
    WORDS: tl.constexpr, FP8: tl.constexpr, PACKED: tl.constexpr, ONE_QUERY: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `decode_kernel`; k_scale and v_scale are per head, or PER_TOKEN as the cache without D.

    WORDS: k and v, and their strides, are of 16-bit words, pairs of elements. ONE_QUERY: all rows see
    the same keys.
    """
    program, split = tl.program_id(0), tl.program_id(1)
    batch, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    length, oldest, first_key, end = split_bounds(
        lengths + batch, split, capacity, seq_q, num_splits, window, WINDOWED, BLOCK_N
    )
    half: tl.constexpr = BLOCK_D // 2
    rows = tl.arange(0, BLOCK_M)
    known = rows < seq_q * group
    limits = length - seq_q + 1 + rows // group
    base = q + batch * q_strides[0] + head * group * q_strides[1]
    even, odd, power = _queries(base, q_strides, rows, known, group, HEAD_DIM, half)
    factor = power * scale_log2
    if not PER_TOKEN:
        factor *= tl.load(k_scale + head * k_scale_strides[1])
    k += head * k_strides[1]
    v += head * v_strides[1]
    table += batch * table_stride

    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    even_sums = tl.zeros((BLOCK_M, half), tl.float32)
    odd_sums = tl.zeros((BLOCK_M, half), tl.float32)
    pages = pages_of(table, first_key, end, batch, PAGE, BLOCK_N)
    for first in range(first_key, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        inside = (positions < end) & (positions >= oldest) if WINDOWED else positions < end
        start, places = first_place(first, PAGE, BLOCK_N), places_from(first, PAGE, BLOCK_N)
        low, high = _columns(k + rows_of(pages, start, places, k_strides), inside,
                             WORDS, FP8, PACKED, HEAD_DIM, half)  # fmt: skip
        logits = tl.dot(even, tl.trans(low))
        logits = tl.dot(odd, tl.trans(high), logits) * factor[:, None]
        scales = factor
        if PER_TOKEN:
            at = rows_of(pages, start, places, k_scale_strides)
            logits *= _scales(k_scale, at, inside, k_scale_strides, head)[None, :]
            at = rows_of(pages, start, places, v_scale_strides)
            scales = _scales(v_scale, at, inside, v_scale_strides, head)
        seen = inside[None, :]
        if not ONE_QUERY:
            seen = seen & (positions[None, :] < limits[:, None])
            if WINDOWED:
                seen = seen & (positions[None, :] >= limits[:, None] - window)
        logits = tl.where(seen, logits, -float("inf"))
        weights, shrink, largest, total = softmax_step(logits, largest, total)
        low, high = _columns(v + rows_of(pages, start, places, v_strides), inside,
                             WORDS, FP8, PACKED, HEAD_DIM, half)  # fmt: skip
        even_sums, odd_sums = _add_values(even_sums * shrink[:, None], odd_sums * shrink[:, None],
                                          weights, low, high, scales, PER_TOKEN)  # fmt: skip
        # Carried over, so that a tile's loads do not wait for its page's number.
        pages = pages_of(table, first + BLOCK_N, end, batch, PAGE, BLOCK_N)
    sums = tl.reshape(tl.join(even_sums, odd_sums), (BLOCK_M, BLOCK_D))
    if not PER_TOKEN:
        sums *= tl.load(v_scale + head * v_scale_strides[1])
    in_head = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    number = head * group + rows % group
    store_rows(out, lse, out_strides, sums, largest, total, batch, number, (rows // group).to(tl.int64),
               known, in_head, kv_heads * group, seq_q, tl.num_programs(0) * group * seq_q, IS_SPLIT, HEAD_DIM, BLOCK_D)  # fmt: skip
