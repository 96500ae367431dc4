"""Triton device code of exact attention: one forward and three backward kernels.

Shape letters: B batch, H query heads, G query heads per key/value head, S sequence, D head size.
Each program owns one tile of rows and walks the other axis; nothing is accumulated across programs,
so every result is deterministic. Logits live in the exp2 domain: `scale_log2 = scale * log2(e)`.

Causal masks are aligned to the bottom right: query i sees key j when j <= i + Sk - Sq. Addresses are
int64 wherever a stride meets an index; the last dimension must be contiguous.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_tile(
    base: tl.tensor,
    first: tl.tensor,
    limit: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Load rows first.. of a (limit, HEAD_DIM) matrix as (ROWS, BLOCK_D), zero outside it."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    start = base + tl.cast(first, tl.int64) * stride
    pointers = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside_rows = (first + rows)[:, None] < limit
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
def _store_tile(
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
def _load_row_values(
    base: tl.tensor, first: tl.tensor, limit: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Load ROWS fp32 values from index first on, zero past `limit`."""
    rows = first + tl.arange(0, ROWS)
    return tl.load(base + rows, mask=rows < limit, other=0.0)


@triton.jit
def _visible(
    queries: tl.tensor, keys: tl.tensor, seq_q: tl.tensor, seq_k: tl.tensor, CAUSAL: tl.constexpr
) -> tl.tensor:
    """Return which (query, key) pairs attend; `queries` and `keys` broadcast against each other."""
    visible = keys < seq_k
    if CAUSAL:
        visible = visible & (keys <= queries + (seq_k - seq_q))
    return visible


@triton.jit
def _key_range(
    first_query: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (end of the key tiles that every query sees whole, end of the keys any query sees)."""
    seen_by_all = seq_k
    seen_by_any = seq_k
    if CAUSAL:
        offset = seq_k - seq_q
        seen_by_all = tl.minimum(seq_k, tl.maximum(0, first_query + 1 + offset))
        seen_by_any = tl.minimum(seq_k, tl.maximum(0, first_query + BLOCK_M + offset))
    return seen_by_all // BLOCK_N * BLOCK_N, seen_by_any


@triton.jit
def _attend_tile(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    stride_ks: tl.tensor,
    stride_vs: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold one key tile into the online softmax state (acc, peak, total) of BLOCK_M queries."""
    keys = _load_tile(k, first_key, seq_k, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if MASKED:
        queries = first_query + tl.arange(0, BLOCK_M)
        key_ids = first_key + tl.arange(0, BLOCK_N)
        visible = _visible(queries[:, None], key_ids[None, :], seq_q, seq_k, CAUSAL)
        logits = tl.where(visible, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * scale_log2)
    # A row that has seen no key yet has peak -inf, and -inf - -inf would be NaN.
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(logits * scale_log2 - anchor[:, None])
    rescale = tl.exp2(peak - anchor)
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    values = _load_tile(v, first_key, seq_k, stride_vs, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_peak, total


@triton.jit(do_not_specialize=["seq_q", "seq_k"])
def forward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    out_strides: tl.tuple,
    num_heads: tl.tensor,
    group: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    scale_log2: tl.tensor,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute `out` and `lse` (fp32, B x H x Sq, contiguous) for BLOCK_M queries of one head."""
    num_tiles = tl.cdiv(seq_q, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    if CAUSAL:
        # The last queries see the most keys: start them first, so that short tiles fill the tail.
        tile = num_tiles - 1 - tile
    first = tile * BLOCK_M
    q += batch * q_strides[0] + head * q_strides[1]
    k += batch * k_strides[0] + head // group * k_strides[1]
    v += batch * v_strides[0] + head // group * v_strides[1]
    out += batch * out_strides[0] + head * out_strides[1]
    lse += row * seq_q

    queries = _load_tile(q, first, seq_q, q_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    whole, end = _key_range(first, seq_q, seq_k, CAUSAL, BLOCK_M, BLOCK_N)
    for key in range(0, whole, BLOCK_N):
        acc, peak, total = _attend_tile(
            acc, peak, total, queries, k, v, first, key, k_strides[2], v_strides[2], seq_q, seq_k,
            scale_log2, False, CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for key in range(whole, end, BLOCK_N):
        acc, peak, total = _attend_tile(
            acc, peak, total, queries, k, v, first, key, k_strides[2], v_strides[2], seq_q, seq_k,
            scale_log2, True, CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    # A query that saw no key has total 0 and peak -inf: output 0, log-sum-exp -inf.
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    log_sum = (peak + tl.log2(total)) * LN_2
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(lse + rows, log_sum, mask=rows < seq_q)
    _store_tile(out, acc, first, seq_q, out_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["seq_q"])
def delta_kernel(
    out: tl.tensor,
    dout: tl.tensor,
    delta: tl.tensor,
    out_strides: tl.tuple,
    dout_strides: tl.tuple,
    num_heads: tl.tensor,
    seq_q: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Compute delta (fp32, B x H x Sq), the row term of the softmax backward: sum of out * dout."""
    num_tiles = tl.cdiv(seq_q, BLOCK_M)
    first = tl.program_id(0) % num_tiles * BLOCK_M
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    out += batch * out_strides[0] + head * out_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    o = _load_tile(out, first, seq_q, out_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do = _load_tile(dout, first, seq_q, dout_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    rows = first + tl.arange(0, BLOCK_M)
    products = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + row * seq_q + rows, products, mask=rows < seq_q)


@triton.jit
def _key_gradient_tile(
    dk: tl.tensor,
    dv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    stride_qs: tl.tensor,
    stride_ds: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add one query tile's part of dK (not yet scaled) and dV for BLOCK_N keys."""
    queries = _load_tile(q, first_query, seq_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    logits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    lse_log2 = _load_row_values(lse, first_query, seq_q, BLOCK_M) * LOG2_E
    weights = tl.exp2(logits * scale_log2 - lse_log2[None, :])
    if MASKED:
        query_ids = first_query + tl.arange(0, BLOCK_M)
        last_seen_by = first_key - (seq_k - seq_q) + tl.arange(0, BLOCK_N)
        visible = last_seen_by[:, None] <= query_ids[None, :]
        weights = tl.where(visible, weights, 0.0)
    do = _load_tile(dout, first_query, seq_q, stride_ds, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dweights = tl.dot(values, tl.trans(do), input_precision="ieee")
    row_delta = _load_row_values(delta, first_query, seq_q, BLOCK_M)
    dlogits = (weights * (dweights - row_delta[None, :])).to(queries.dtype)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(dlogits, queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["seq_q", "seq_k"])
def key_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dk_out: tl.tensor,
    dv_out: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    grad_strides: tl.tuple,
    num_kv_heads: tl.tensor,
    group: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    scale: tl.tensor,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute dK and dV (same strides) for BLOCK_N keys of one key/value head over its whole group.

    Keys past seq_k need no mask: their rows of dK and dV are garbage that is never stored.
    """
    num_tiles = tl.cdiv(seq_k, BLOCK_N)
    first = tl.program_id(0) % num_tiles * BLOCK_N
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, kv_head = row // num_kv_heads, row % num_kv_heads
    k += batch * k_strides[0] + kv_head * k_strides[1]
    v += batch * v_strides[0] + kv_head * v_strides[1]
    dk_out += batch * grad_strides[0] + kv_head * grad_strides[1]
    dv_out += batch * grad_strides[0] + kv_head * grad_strides[1]
    keys = _load_tile(k, first, seq_k, k_strides[2], BLOCK_N, HEAD_DIM, BLOCK_D, True)
    values = _load_tile(v, first, seq_k, v_strides[2], BLOCK_N, HEAD_DIM, BLOCK_D, True)

    first_query = 0
    whole_query = 0
    if CAUSAL:
        # Queries before first_query see none of these keys; from whole_query on, all of them.
        diagonal = first + seq_q - seq_k
        first_query = tl.maximum(0, diagonal) // BLOCK_M * BLOCK_M
        whole_query = tl.cdiv(tl.maximum(0, diagonal + BLOCK_N - 1), BLOCK_M) * BLOCK_M
        whole_query = tl.minimum(tl.cdiv(seq_q, BLOCK_M) * BLOCK_M, whole_query)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if CAUSAL:
        for member in range(group):
            head = kv_head * group + member
            q_head = q + batch * q_strides[0] + head * q_strides[1]
            do_head = dout + batch * dout_strides[0] + head * dout_strides[1]
            lse_head = lse + (row * group + member) * seq_q
            delta_head = delta + (row * group + member) * seq_q
            for query in range(first_query, whole_query, BLOCK_M):
                dk, dv = _key_gradient_tile(
                    dk, dv, keys, values, q_head, do_head, lse_head, delta_head, query, first,
                    q_strides[2], dout_strides[2], seq_q, seq_k, scale * LOG2_E, True,
                    HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
    for member in range(group):
        head = kv_head * group + member
        q_head = q + batch * q_strides[0] + head * q_strides[1]
        do_head = dout + batch * dout_strides[0] + head * dout_strides[1]
        lse_head = lse + (row * group + member) * seq_q
        delta_head = delta + (row * group + member) * seq_q
        for query in range(whole_query, seq_q, BLOCK_M):
            dk, dv = _key_gradient_tile(
                dk, dv, keys, values, q_head, do_head, lse_head, delta_head, query, first,
                q_strides[2], dout_strides[2], seq_q, seq_k, scale * LOG2_E, False,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    _store_tile(dk_out, dk * scale, first, seq_k, grad_strides[2], BLOCK_N, HEAD_DIM, BLOCK_D)
    _store_tile(dv_out, dv, first, seq_k, grad_strides[2], BLOCK_N, HEAD_DIM, BLOCK_D)


@triton.jit
def _query_gradient_tile(
    dq: tl.tensor,
    queries: tl.tensor,
    do: tl.tensor,
    lse_log2: tl.tensor,
    row_delta: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    stride_ks: tl.tensor,
    stride_vs: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    scale_log2: tl.tensor,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Add one key tile's part of dQ (not yet scaled) for BLOCK_M queries."""
    keys = _load_tile(k, first_key, seq_k, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    weights = tl.exp2(logits * scale_log2 - lse_log2[:, None])
    if MASKED:
        query_ids = first_query + tl.arange(0, BLOCK_M)
        key_ids = first_key + tl.arange(0, BLOCK_N)
        visible = _visible(query_ids[:, None], key_ids[None, :], seq_q, seq_k, CAUSAL)
        weights = tl.where(visible, weights, 0.0)
    values = _load_tile(v, first_key, seq_k, stride_vs, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    dweights = tl.dot(do, tl.trans(values), input_precision="ieee")
    dlogits = weights * (dweights - row_delta[:, None])
    return tl.dot(dlogits.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["seq_q", "seq_k"])
def query_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dq_out: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    grad_strides: tl.tuple,
    num_heads: tl.tensor,
    group: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    scale: tl.tensor,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute dQ for BLOCK_M queries of one head."""
    num_tiles = tl.cdiv(seq_q, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    if CAUSAL:
        tile = num_tiles - 1 - tile
    first = tile * BLOCK_M
    q += batch * q_strides[0] + head * q_strides[1]
    k += batch * k_strides[0] + head // group * k_strides[1]
    v += batch * v_strides[0] + head // group * v_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    dq_out += batch * grad_strides[0] + head * grad_strides[1]

    queries = _load_tile(q, first, seq_q, q_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do = _load_tile(dout, first, seq_q, dout_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    lse_log2 = _load_row_values(lse + row * seq_q, first, seq_q, BLOCK_M) * LOG2_E
    row_delta = _load_row_values(delta + row * seq_q, first, seq_q, BLOCK_M)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole, end = _key_range(first, seq_q, seq_k, CAUSAL, BLOCK_M, BLOCK_N)
    for key in range(0, whole, BLOCK_N):
        dq = _query_gradient_tile(
            dq, queries, do, lse_log2, row_delta, k, v, first, key, k_strides[2], v_strides[2],
            seq_q, seq_k, scale * LOG2_E, False, CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for key in range(whole, end, BLOCK_N):
        dq = _query_gradient_tile(
            dq, queries, do, lse_log2, row_delta, k, v, first, key, k_strides[2], v_strides[2],
            seq_q, seq_k, scale * LOG2_E, True, CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    _store_tile(dq_out, dq * scale, first, seq_q, grad_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D)
