"""Triton device code that the attention kernels share: tiles in memory, what is seen, softcap.

Shape letters: B batch, H query heads, S sequence, D head size. MASK is a kind of masks.py. Whether
query i sees key j is told from either side: `key_runs` gives the keys of queries, `query_run` the
queries of keys. Tiles that are seen whole need no mask; only the partial ones are masked.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    base: tl.tensor,
    first: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Load rows first.. of a matrix of HEAD_DIM columns as (ROWS, BLOCK_D).

    Zero outside the columns and, with CHECK_ROWS, outside rows floor..limit: what lies there may be
    NaN and 0 * NaN is NaN.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    start = base + tl.cast(first, tl.int64) * stride
    pointers = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside_rows = ((first + rows)[:, None] < limit) & ((first + rows)[:, None] >= floor)
    inside_columns = columns[None, :] < HEAD_DIM
    if CHECK_ROWS and HEAD_DIM != BLOCK_D:
        tile = tl.load(pointers, mask=inside_rows & inside_columns, other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=inside_rows, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        tile = tl.load(pointers, mask=inside_columns, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    base: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    limit: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Store a (ROWS, BLOCK_D) tile to rows first.. of a (limit, HEAD_DIM) matrix."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    start = base + tl.cast(first, tl.int64) * stride
    pointers = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = ((first + rows)[:, None] < limit) & (columns[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_row_values(
    base: tl.tensor,
    first: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    ROWS: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Load ROWS fp32 values from index first on; with CHECK_ROWS, zero outside floor..limit."""
    rows = first + tl.arange(0, ROWS)
    if CHECK_ROWS:
        values = tl.load(base + rows, mask=(rows >= floor) & (rows < limit), other=0.0)
    else:
        values = tl.load(base + rows)
    return values


@triton.jit
def table_start(
    table: tl.tensor,
    strides: tl.tuple,
    batch: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    seq_k: tl.tensor,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return where the part of a mask's table for one (batch, head) begins, or its row of blocks.

    `strides` (batch, head) are 0 where all share one part; `seq_k` is the length of the other axis.
    """
    start = table
    if MASK == "documents":
        start = table + batch * strides[0]
    elif MASK == "blocks":
        start = table + batch * strides[0] + head * strides[1]
        start += (row // BLOCK).to(tl.int64) * (2 + tl.cdiv(seq_k, BLOCK))
    return start


@triton.jit
def key_run(
    query: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    table: tl.tensor,
    MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (first key seen, end of the keys seen), without a prefix; `query` may be a vector."""
    own = query + (seq_k - seq_q)
    low = query * 0
    high = low + seq_k
    if MASK == "documents":
        low = tl.load(table + query, mask=query < seq_q, other=0)
        high = tl.load(table + seq_q + query, mask=query < seq_q, other=0)
    elif MASK != "full":
        high = tl.minimum(seq_k, tl.maximum(0, own + right + 1))
        if MASK == "window" or MASK == "prefix" or MASK == "global":
            low = tl.maximum(0, own - left)
    return low, high


@triton.jit
def prefix_end(
    query: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    prefix: tl.tensor,
    MASK: tl.constexpr,
) -> tl.tensor:
    """Return the end of the prefix that each query sees, 0 without one."""
    end = query * 0
    if MASK == "prefix":
        end += tl.minimum(prefix, seq_k)
    elif MASK == "global":
        end = tl.maximum(0, tl.minimum(tl.minimum(prefix, seq_k), query + (seq_k - seq_q) + 1))
    return end


@triton.jit
def query_run(
    key: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    prefix: tl.tensor,
    table: tl.tensor,
    MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (first query that sees `key`, end of those that do); `key` may be a vector."""
    own = key - (seq_k - seq_q)
    low = key * 0
    high = low + seq_q
    if MASK == "documents":
        low = tl.load(table + key, mask=key < seq_k, other=0)
        high = tl.load(table + seq_k + key, mask=key < seq_k, other=0)
    elif MASK != "full":
        low = tl.minimum(seq_q, tl.maximum(0, own - right))
        if MASK == "window" or MASK == "prefix" or MASK == "global":
            high = tl.minimum(seq_q, tl.maximum(0, own + left + 1))
        if MASK == "prefix":
            low = tl.where(key < prefix, 0, low)
        if MASK == "prefix" or MASK == "global":
            high = tl.where(key < prefix, seq_q, high)
    return low, high


@triton.jit
def split_run(
    low_first: tl.tensor,
    low_last: tl.tensor,
    high_first: tl.tensor,
    high_last: tl.tensor,
    head_end: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return tile numbers (begin, whole_begin, whole_end, end) of the run that a tile's rows see.

    Its first row sees low_first..high_first and its last low_last..high_last. Tiles begin..end are
    needed, those of whole_begin..whole_end are seen by every row; all start at head_end or later.
    """
    begin = low_first // BLOCK
    end = tl.where(high_last > low_first, tl.cdiv(high_last, BLOCK), begin)
    whole_begin = tl.minimum(tl.maximum(begin, tl.cdiv(low_last, BLOCK)), end)
    whole_end = tl.maximum(whole_begin, tl.minimum(high_first // BLOCK, end))
    begin, end = tl.maximum(begin, head_end), tl.maximum(end, head_end)
    return begin, tl.maximum(whole_begin, head_end), tl.maximum(whole_end, head_end), end


@triton.jit
def visits_of_run(
    low_first: tl.tensor,
    low_last: tl.tensor,
    high_first: tl.tensor,
    high_last: tl.tensor,
    prefix_first: tl.tensor,
    prefix_last: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the visits to the tiles of a run and of the prefix before it, for `whole_tile` and co.

    They are (head, whole_begin, wholes, partial head, left, begin, whole_end, partials): first the
    prefix's `head` whole tiles, then those from whole_begin on, `wholes` in all; the prefix's
    partial tiles, `left` ones from begin on and those from whole_end on, `partials` in all.
    """
    head = prefix_first // BLOCK
    head_end = tl.cdiv(prefix_last, BLOCK)
    begin, whole_begin, whole_end, end = split_run(
        low_first, low_last, high_first, high_last, head_end, BLOCK
    )
    wholes = head + whole_end - whole_begin
    left = whole_begin - begin
    partials = head_end - head + left + end - whole_end
    return head, whole_begin, wholes, head_end - head, left, begin, whole_end, partials


@triton.jit
def visits_of_blocks(
    table: tl.tensor, MASK_BLOCK: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return visits as `visits_of_run` does, for one row of a block table."""
    per_block: tl.constexpr = MASK_BLOCK // BLOCK
    wholes = tl.load(table) * per_block
    partials = tl.load(table + 1) * per_block
    return wholes * 0, wholes * 0, wholes, wholes * 0, wholes * 0, wholes * 0, wholes * 0, partials


@triton.jit
def visits_of_queries(
    first: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    prefix: tl.tensor,
    table: tl.tensor,
    MASK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:
    """Return (visits to key tiles, first key, end of the keys) for the BLOCK_M queries from `first`."""
    last = tl.minimum(first + BLOCK_M, seq_q) - 1
    low_first, high_first = key_run(first, seq_q, seq_k, left, right, table, MASK)
    low_last, high_last = key_run(last, seq_q, seq_k, left, right, table, MASK)
    ahead_first = prefix_end(first, seq_q, seq_k, prefix, MASK)
    ahead_last = prefix_end(last, seq_q, seq_k, prefix, MASK)
    if MASK == "blocks":
        visits = visits_of_blocks(table, MASK_BLOCK, BLOCK_N)
    else:
        visits = visits_of_run(
            low_first, low_last, high_first, high_last, ahead_first, ahead_last, BLOCK_N
        )
    floor = tl.where(ahead_last > 0, 0, low_first)
    return visits, floor, tl.maximum(ahead_last, high_last)


@triton.jit
def visits_of_keys(
    first: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    prefix: tl.tensor,
    table: tl.tensor,
    MASK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor, tl.tensor]:
    """Return (visits to query tiles, first query, end of the queries) for BLOCK_N keys."""
    last = tl.minimum(first + BLOCK_N, seq_k) - 1
    low_first, high_first = query_run(first, seq_q, seq_k, left, right, prefix, table, MASK)
    low_last, high_last = query_run(last, seq_q, seq_k, left, right, prefix, table, MASK)
    if MASK == "prefix" or MASK == "global":
        # Where the prefix ends inside the tile, its keys' runs of queries begin and end apart.
        apart = (first < prefix) & (last >= prefix)
        low_last = tl.where(apart, seq_q, low_last)
        high_last = tl.where(apart, seq_q, high_last)
    if MASK == "blocks":
        visits = visits_of_blocks(table, MASK_BLOCK, BLOCK_M)
    else:
        none = first * 0
        visits = visits_of_run(low_first, low_last, high_first, high_last, none, none, BLOCK_M)
    return visits, low_first, high_last


@triton.jit
def _listed_tile(
    visit: tl.tensor, table: tl.tensor, MASK_BLOCK: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    per_block: tl.constexpr = MASK_BLOCK // BLOCK
    block = tl.load(table + 2 + visit // per_block)
    return block * MASK_BLOCK + visit % per_block * BLOCK


@triton.jit
def whole_tile(
    visit: tl.tensor,
    visits: tl.tuple,
    table: tl.tensor,
    MASK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the first row of the visit-th tile that needs no mask."""
    if MASK == "blocks":
        start = _listed_tile(visit, table, MASK_BLOCK, BLOCK)
    elif MASK == "prefix" or MASK == "global":
        later = visit - visits[0]
        start = tl.where(later < 0, visit, visits[1] + later) * BLOCK
    else:
        start = (visits[1] + visit) * BLOCK
    return start


@triton.jit
def partial_tile(
    visit: tl.tensor,
    visits: tl.tuple,
    table: tl.tensor,
    MASK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the first row of the visit-th tile that must be masked."""
    if MASK == "blocks":
        start = _listed_tile(visits[2] + visit, table, MASK_BLOCK, BLOCK)
    else:
        later = visit - visits[3]
        run = tl.where(later < visits[4], visits[5] + later, visits[6] + later - visits[4])
        start = tl.where(visit < visits[3], visits[0] + visit, run) * BLOCK
    return start


@triton.jit
def capped(
    logits: tl.tensor, scale: tl.tensor, softcap: tl.tensor, EXACT: tl.constexpr
) -> tl.tensor:
    """Return tanh(logits * scale / softcap).

    It is 1 - 2 / (exp(2x) + 1), which loses the digits of a small x; EXACT takes the series there.
    """
    x = logits * (scale / softcap)
    found = 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2_E)) + 1.0)
    if EXACT:
        square = x * x
        terms = -0.05396825396825397 + square * 0.021869488536155203
        terms = -0.3333333333333333 + square * (0.13333333333333333 + square * terms)
        series = x * (1.0 + square * terms)
        found = tl.where(tl.abs(x) < 0.15, series, found)
    return found
