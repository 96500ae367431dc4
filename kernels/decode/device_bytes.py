"""Triton device code of decode attention over a cache of one byte per element, fp8 (e4m3) or int8.

As `decode_kernel` in device.py, but bound by memory, not by taking bytes apart: two adjacent elements
are loaded, staged and transposed as one 16-bit word, which tensor cores' loads can do, and split into
two fp16 tiles, of even and of odd columns, in registers. And each warp attends keys of its own,
WARPS x (keys of a warp), until the end of the loop: no warp waits for another one's maxima.
"""

# ruff: noqa: N803, RET505 (compile-time arguments are upper case, as Triton code has them; and what
# stands behind a return without an else is compiled too)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.decode.device import places_in, softmax_step, split_bounds, store_rows


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
    inside = known[:, None] & (columns < HEAD_DIM)[None, :]
    even = tl.load(base + places, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(base + places + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    power = tl.exp2(tl.floor(tl.log2(tl.where(largest > 0, largest, 1.0))))
    even, odd = even / power[:, None], odd / power[:, None]
    return even.to(tl.float16), odd.to(tl.float16), power


@triton.jit
def _for_each_warp(rows, WARPS: tl.constexpr):
    """(M, N) as (WARPS, M, N)."""
    return tl.broadcast_to(rows[None, :, :], (WARPS, rows.shape[0], rows.shape[1]))


@triton.jit
def _positions(first, WARPS: tl.constexpr, KEYS: tl.constexpr):
    """The keys of each warp, (WARPS, KEYS)."""
    return first + KEYS * tl.arange(0, WARPS)[:, None] + tl.arange(0, KEYS)[None, :]


@triton.jit
def _pages_of(table, first, end, row, PAGE: tl.constexpr, WARPS: tl.constexpr, KEYS: tl.constexpr):
    """The page of each position of a tile (one for a warp where pages hold its keys whole), int64.

    Without pages (PAGE 0) a row of the cache is its only page.
    """
    if PAGE == 0:
        return row
    else:
        if PAGE % KEYS == 0:
            positions = first + KEYS * tl.arange(0, WARPS)[:, None]
        else:
            positions = _positions(first, WARPS, KEYS)
        return tl.load(table + positions // PAGE, mask=positions < end, other=0).to(tl.int64)


@triton.jit
def _words(cache, pages, places, inside, strides, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Load a tile's pairs of elements, (WARPS, KEYS, HALF) in int16, zero outside."""
    columns = tl.arange(0, HALF)
    addresses = cache + (pages * strides[0] + places * strides[2])[:, :, None]
    wanted = inside[:, :, None]
    if HEAD_DIM != 2 * HALF:
        wanted = wanted & (columns < HEAD_DIM // 2)[None, None, :]
    return tl.load(addresses + columns[None, None, :], mask=wanted, other=0)


@triton.jit
def _scales(scale, pages, places, inside, strides, head):
    """Load the scales of a tile's keys, (WARPS, KEYS)."""
    at = pages * strides[0] + head * strides[1] + places * strides[2]
    return tl.load(scale + at, mask=inside, other=0.0)


@triton.jit
def _add_values(even, odd, weights, words, scales, PER_TOKEN: tl.constexpr, FP8: tl.constexpr,
                PACKED: tl.constexpr):  # fmt: skip
    """even, odd + weights @ even, odd columns of the values, each value times its scale."""
    low, high = _halves(words, FP8, PACKED)
    if PER_TOKEN:
        # Weights times scales relative to the warp's largest stay within fp16's range.
        unit = tl.max(tl.abs(scales), axis=1)
        unit = tl.where(unit > 0, unit, 1.0)
        weights = (weights * (scales / unit[:, None])[:, None, :]).to(tl.float16)
        unit = unit[:, None, None]
        return even + tl.dot(weights, low) * unit, odd + tl.dot(weights, high) * unit
    weights = weights.to(tl.float16)
    return tl.dot(weights, low, even), tl.dot(weights, high, odd)


@triton.jit
def _joined(even, odd, largest, total):
    """Add the warps' parts up: (M, D) sums, and the rows' largest logits and totals."""
    top = tl.max(largest, axis=0)
    share = tl.exp2(largest - tl.where(top == -float("inf"), 0.0, top)[None, :])
    even = tl.sum(even * share[:, :, None], axis=0)
    odd = tl.sum(odd * share[:, :, None], axis=0)
    sums = tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
    return sums, top, tl.sum(total * share, axis=0)


@triton.jit
def byte_kernel(
    q, k, v, out, lse, lengths, table, k_scale, v_scale,
    q_strides, k_strides, v_strides, out_strides, k_scale_strides, v_scale_strides, table_stride,
    kv_heads, group, seq_q, capacity, num_splits, window, scale_log2,
    WINDOWED: tl.constexpr, PAGE: tl.constexpr, PER_TOKEN: tl.constexpr, IS_SPLIT: tl.constexpr,
    FP8: tl.constexpr, PACKED: tl.constexpr, WARPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `decode_kernel`; k and v, and their strides, are of 16-bit words: pairs of elements."""
    program, split = tl.program_id(0), tl.program_id(1)
    batch, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    length, oldest, first_key, end = split_bounds(
        lengths + batch, split, capacity, seq_q, num_splits, window, WINDOWED, BLOCK_N
    )
    own: tl.constexpr = BLOCK_N // WARPS
    half: tl.constexpr = BLOCK_D // 2
    rows = tl.arange(0, BLOCK_M)
    known = rows < seq_q * group
    limits = (length - seq_q + 1 + rows // group)[None, :, None]
    base = q + batch * q_strides[0] + head * group * q_strides[1]
    even, odd, power = _queries(base, q_strides, rows, known, group, HEAD_DIM, half)
    even, odd = _for_each_warp(even, WARPS), _for_each_warp(odd, WARPS)
    factor = power * scale_log2
    if not PER_TOKEN:
        factor *= tl.load(k_scale + head * k_scale_strides[1])
    k += head * k_strides[1]
    v += head * v_strides[1]
    table += batch * table_stride

    largest = tl.full((WARPS, BLOCK_M), -float("inf"), tl.float32)
    total = tl.zeros((WARPS, BLOCK_M), tl.float32)
    even_sums = tl.zeros((WARPS, BLOCK_M, half), tl.float32)
    odd_sums = tl.zeros((WARPS, BLOCK_M, half), tl.float32)
    pages = _pages_of(table, first_key, end, batch, PAGE, WARPS, own)
    for first in range(first_key, end, BLOCK_N):
        positions = _positions(first, WARPS, own)
        inside = (positions < end) & (positions >= oldest) if WINDOWED else positions < end
        places = places_in(positions, PAGE)
        keys = _words(k, pages, places, inside, k_strides, HEAD_DIM, half)
        values = _words(v, pages, places, inside, v_strides, HEAD_DIM, half)
        low, high = _halves(keys, FP8, PACKED)
        logits = tl.dot(even, tl.permute(low, (0, 2, 1)))
        logits = tl.dot(odd, tl.permute(high, (0, 2, 1)), logits) * factor[None, :, None]
        scales = factor
        if PER_TOKEN:
            logits *= _scales(k_scale, pages, places, inside, k_scale_strides, head)[:, None, :]
            scales = _scales(v_scale, pages, places, inside, v_scale_strides, head)
        seen = (positions[:, None, :] < limits) & inside[:, None, :]
        if WINDOWED:
            seen = seen & (positions[:, None, :] >= limits - window)
        logits = tl.where(seen, logits, -float("inf"))
        weights, shrink, largest, total = softmax_step(logits, largest, total)
        shrink = tl.expand_dims(shrink, 2)
        even_sums, odd_sums = _add_values(
            even_sums * shrink, odd_sums * shrink, weights, values, scales, PER_TOKEN, FP8, PACKED
        )
        # Carried over, so that a tile's loads do not wait for its page's number.
        pages = _pages_of(table, first + BLOCK_N, end, batch, PAGE, WARPS, own)
    sums, largest, total = _joined(even_sums, odd_sums, largest, total)
    if not PER_TOKEN:
        sums *= tl.load(v_scale + head * v_scale_strides[1])
    in_head = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    number = head * group + rows % group
    store_rows(out, lse, out_strides, sums, largest, total, batch, number, (rows // group).to(tl.int64),
               known, in_head, kv_heads * group, seq_q, tl.num_programs(0) * group * seq_q, IS_SPLIT, HEAD_DIM, BLOCK_D)  # fmt: skip
