"""Triton device code of decode attention: a few query tokens against a long cache.

A program holds all query rows of one group (row r is query r // group of head r % group) and walks
over its split of the keys. Logits live in the exp2 domain. Addresses are int64 wherever a page, row
or head meets a stride. Nothing behind a row's length is read: stale pages may hold NaN.
"""

# ruff: noqa: N803, RET505 (compile-time arguments are upper case, as Triton code has them; and what
# stands behind a return without an else is compiled too)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_bounds(length, split, capacity, seq_q, num_splits, window, WINDOWED: tl.constexpr,
                 BLOCK_N: tl.constexpr):  # fmt: skip
    """Return a row's length, the oldest key that a query of it sees, and a split's first key and end."""
    # A length may have 64 bits: it is cut to the cache before it is narrowed.
    length = tl.minimum(tl.load(length).to(tl.int64), capacity).to(tl.int32)
    oldest = tl.maximum(length - seq_q + 1 - window, 0) if WINDOWED else 0
    first_tile = oldest // BLOCK_N
    per_split = tl.cdiv(tl.cdiv(length, BLOCK_N) - first_tile, num_splits) * BLOCK_N
    first_key = first_tile * BLOCK_N + split * per_split
    return length, oldest, first_key, tl.minimum(first_key + per_split, length)


@triton.jit
def _queries(base, strides, rows, known, group, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the group's queries as (rows, BLOCK_D), zero where there is none."""
    columns = tl.arange(0, BLOCK_D)
    heads, tokens = (rows % group).to(tl.int64), (rows // group).to(tl.int64)
    places = heads * strides[1] + tokens * strides[2]
    inside = known[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(base + places[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def pages_of(table, first, end, row, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each position of a tile (one for all where a page holds whole tiles), int64.

    Without pages (PAGE 0) a row of the cache is its only page.
    """
    if PAGE == 0:
        return row
    if PAGE % BLOCK_N == 0:
        pages = tl.load(table + first // PAGE, mask=first < end, other=0)
    else:
        positions = first + tl.arange(0, BLOCK_N)
        pages = tl.load(table + positions // PAGE, mask=positions < end, other=0)
    return pages.to(tl.int64)


@triton.jit
def first_place(first, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile begins in its page, int64: 0 where it begins with a page or holds parts of several."""
    if PAGE == 0:
        return tl.cast(first, tl.int64)
    elif PAGE % BLOCK_N == 0:
        return tl.cast(first % PAGE, tl.int64)
    else:
        return tl.zeros([], tl.int64)


@triton.jit
def places_from(first, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """How far behind `first_place` the keys of a tile lie in their pages, int64.

    Tiles begin at multiples of BLOCK_N. Where pages fill tiles, or tiles pages, this is the same for all
    tiles, and what is multiplied with it leaves the loop.
    """
    keys = tl.arange(0, BLOCK_N)
    if PAGE == 0 or PAGE % BLOCK_N == 0:
        return keys.to(tl.int64)
    elif BLOCK_N % PAGE == 0:
        return (keys % PAGE).to(tl.int64)
    else:
        return ((first + keys) % PAGE).to(tl.int64)


@triton.jit
def rows_of(pages, start, places, strides):
    """Where the keys of a tile lie, in elements: by strides over pages, heads and keys."""
    return pages * strides[0] + start * strides[2] + places * strides[2]


@triton.jit
def softmax_step(logits, largest, total):
    """Fold a tile of logits in: return (weights, shrink of what was summed, largest, total)."""
    higher = tl.maximum(largest, tl.max(logits, axis=1))
    # While a row has seen nothing, -inf - -inf must not be taken.
    anchor = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(logits - anchor[:, None])
    shrink = tl.exp2(largest - anchor)
    return weights, shrink, higher, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def decode_kernel(
    q, k, v, out, lse, lengths, table,
    q_strides, k_strides, v_strides, out_strides, table_stride,
    kv_heads, group, seq_q, capacity, num_splits, window, scale_log2,
    WINDOWED: tl.constexpr, PAGE: tl.constexpr, IS_SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One split of one key-value head of one row: its output, or its part and log2-sum-exp2.

    PAGE 0: k and v are (B, Hkv, S, D). Else they are (pages, Hkv, PAGE, D) and `table` says which
    pages a row has.
    WINDOWED: a query sees the last `window` keys up to its own; none before them is read.
    """
    program, split = tl.program_id(0), tl.program_id(1)
    batch, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    length, oldest, first_key, end = split_bounds(
        lengths + batch, split, capacity, seq_q, num_splits, window, WINDOWED, BLOCK_N
    )
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_head = (columns < HEAD_DIM)[None, :]
    known = rows < seq_q * group
    limits = length - seq_q + 1 + rows // group
    base = q + batch * q_strides[0] + head * group * q_strides[1]
    queries = _queries(base, q_strides, rows, known, group, HEAD_DIM, BLOCK_D)
    k += head * k_strides[1]
    v += head * v_strides[1]
    table += batch * table_stride

    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    pages = pages_of(table, first_key, end, batch, PAGE, BLOCK_N)
    for first in range(first_key, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        inside = (positions < end) & (positions >= oldest) if WINDOWED else positions < end
        start, places = first_place(first, PAGE, BLOCK_N), places_from(first, PAGE, BLOCK_N)
        wanted = inside[:, None] & in_head
        k_rows = rows_of(pages, start, places, k_strides)
        v_rows = rows_of(pages, start, places, v_strides)
        keys = tl.load(k + k_rows[:, None] + columns[None, :], mask=wanted, other=0.0)
        values = tl.load(v + v_rows[:, None] + columns[None, :], mask=wanted, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        seen = (positions[None, :] < limits[:, None]) & inside[None, :]
        if WINDOWED:
            seen = seen & (positions[None, :] >= limits[:, None] - window)
        logits = tl.where(seen, logits, -float("inf"))
        weights, shrink, largest, total = softmax_step(logits, largest, total)
        weights = weights.to(values.dtype)
        sums = tl.dot(weights, values, sums * shrink[:, None], input_precision="ieee")
        # Carried over, so that a tile's loads do not wait for its page's number.
        pages = pages_of(table, first + BLOCK_N, end, batch, PAGE, BLOCK_N)
    number = head * group + rows % group
    store_rows(out, lse, out_strides, sums, largest, total, batch, number, (rows // group).to(tl.int64),
           known, in_head, kv_heads * group, seq_q, tl.num_programs(0) * group * seq_q, IS_SPLIT, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit
def store_rows(
    out, lse, out_strides, sums, largest, total, batch, head, token, known, in_head, heads, seq_q,
    num_rows, IS_SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store rows of the output; of a split: its part, (splits, B, Hq, Sq, D), and log2-sum-exp2."""
    nothing = total == 0.0
    safe = tl.where(nothing, 1.0, total)
    result = tl.where(nothing[:, None], 0.0, sums / safe[:, None])
    place = batch * out_strides[0] + head * out_strides[1] + token * out_strides[2]
    if IS_SPLIT:
        number = (batch * heads + head) * seq_q + token
        number += tl.program_id(1).to(tl.int64) * num_rows
        place = number * HEAD_DIM
        tl.store(
            lse + number, tl.where(nothing, -float("inf"), largest + tl.log2(safe)), mask=known
        )
    columns = tl.arange(0, BLOCK_D)
    inside = known[:, None] & in_head
    tl.store(out + place[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    parts,
    lse,
    out,
    out_strides,
    heads,
    seq_q,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One query of one head: the mean of its parts, weighted by exp2(their log2-sum-exp2).

    A split that saw no key has -inf there and weight 0, whatever its part holds.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    largest = tl.load(lse + row)
    for split in range(1, num_splits):
        largest = tl.maximum(largest, tl.load(lse + row + tl.cast(split, tl.int64) * rows))
    anchor = tl.where(largest == -float("inf"), 0.0, largest)
    total = 0.0
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(num_splits):
        place = row + tl.cast(split, tl.int64) * rows
        norm = tl.load(lse + place)
        weight = tl.exp2(norm - anchor)
        part = tl.load(parts + place * HEAD_DIM + columns, mask=inside, other=0.0)
        part = tl.where(norm == -float("inf"), 0.0, part)
        total += weight
        sums += weight * part
    result = sums / tl.where(total == 0.0, 1.0, total)
    batch, head, token = row // (heads * seq_q), row // seq_q % heads, row % seq_q
    place = batch * out_strides[0] + head * out_strides[1] + token * out_strides[2]
    tl.store(out + place + columns, result.to(out.dtype.element_ty), mask=inside)
