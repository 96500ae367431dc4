"""Triton device code of exact attention, backward: one kernel for dK and dV, one for dQ.

Letters and rules as in device.py. The weights are recomputed from the log-sum-exp, so sinks need
nothing here: they are in it.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.device_tiles import (
    LOG2_E,
    capped,
    key_run,
    load_row_values,
    load_tile,
    partial_tile,
    prefix_end,
    query_run,
    store_tile,
    table_start,
    visits_of_keys,
    visits_of_queries,
    whole_tile,
)


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
    low: tl.tensor,
    high: tl.tensor,
    first_query: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    stride_qs: tl.tensor,
    stride_ds: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add one query tile's part of dK (not yet scaled) and dV for keys seen by low..high."""
    queries = load_tile(q, first_query, floor, limit, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED)
    logits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    lse_log2 = load_row_values(lse, first_query, floor, limit, BLOCK_M, MASKED) * LOG2_E
    scale_log2 = scale * LOG2_E
    if CAPPED:
        logits = capped(logits, scale, softcap, keys.dtype == tl.float32)
        scale_log2 = softcap * LOG2_E
    weights = tl.exp2(logits * scale_log2 - lse_log2[None, :])
    if MASKED:
        query_ids = (first_query + tl.arange(0, BLOCK_M))[None, :]
        visible = (query_ids >= low[:, None]) & (query_ids < high[:, None])
        weights = tl.where(visible, weights, 0.0)
    do = load_tile(dout, first_query, floor, limit, stride_ds, BLOCK_M, VALUE_DIM, BLOCK_V, MASKED)
    dweights = tl.dot(values, tl.trans(do), input_precision="ieee")
    row_delta = load_row_values(delta, first_query, floor, limit, BLOCK_M, MASKED)
    dlogits = weights * (dweights - row_delta[None, :])
    if CAPPED:
        dlogits = dlogits * (1.0 - logits * logits)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
    dk = tl.dot(dlogits.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["seq_q", "seq_k", "left", "right", "prefix"])
def key_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dk_out: tl.tensor,
    dv_out: tl.tensor,
    table: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    dk_strides: tl.tuple,
    dv_strides: tl.tuple,
    table_strides: tl.tuple,
    num_kv_heads: tl.tensor,
    group: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    prefix: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    MASK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute dK and dV for BLOCK_N keys of one key/value head over its whole group."""
    num_tiles = tl.cdiv(seq_k, BLOCK_N)
    first = tl.program_id(0) % num_tiles * BLOCK_N
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, kv_head = row // num_kv_heads, row % num_kv_heads
    k += batch * k_strides[0] + kv_head * k_strides[1]
    v += batch * v_strides[0] + kv_head * v_strides[1]
    keys = load_tile(k, first, 0, seq_k, k_strides[2], BLOCK_N, HEAD_DIM, BLOCK_D, True)
    values = load_tile(v, first, 0, seq_k, v_strides[2], BLOCK_N, VALUE_DIM, BLOCK_V, True)
    # Keys past seq_k need no mask: their rows of dK and dV are garbage that is never stored.
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    rows = first + tl.arange(0, BLOCK_N)
    for member in range(group):
        head = kv_head * group + member
        q_head = q + batch * q_strides[0] + head * q_strides[1]
        do_head = dout + batch * dout_strides[0] + head * dout_strides[1]
        lse_head = lse + (row * group + member) * seq_q
        delta_head = delta + (row * group + member) * seq_q
        listed = table_start(table, table_strides, batch, head, first, seq_q, MASK, MASK_BLOCK)
        low, high = query_run(rows, seq_q, seq_k, left, right, prefix, listed, MASK)
        visits, floor, limit = visits_of_keys(
            first, seq_q, seq_k, left, right, prefix, listed, MASK, MASK_BLOCK, BLOCK_M, BLOCK_N
        )
        for visit in range(visits[7] if PARTIALS else 0):
            query = partial_tile(visit, visits, listed, MASK, MASK_BLOCK, BLOCK_M)
            dk, dv = _key_gradient_tile(
                dk, dv, keys, values, q_head, do_head, lse_head, delta_head, low, high,
                query, floor, limit, q_strides[2], dout_strides[2], scale, softcap,
                True, CAPPED, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_V,
            )  # fmt: skip
        for visit in range(visits[2]):
            query = whole_tile(visit, visits, listed, MASK, MASK_BLOCK, BLOCK_M)
            dk, dv = _key_gradient_tile(
                dk, dv, keys, values, q_head, do_head, lse_head, delta_head, low, high,
                query, floor, limit, q_strides[2], dout_strides[2], scale, softcap,
                False, CAPPED, HEAD_DIM, VALUE_DIM, BLOCK_M, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    dk_out += batch * dk_strides[0] + kv_head * dk_strides[1]
    dv_out += batch * dv_strides[0] + kv_head * dv_strides[1]
    store_tile(dk_out, dk * scale, first, seq_k, dk_strides[2], BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_out, dv, first, seq_k, dv_strides[2], BLOCK_N, VALUE_DIM, BLOCK_V)


@triton.jit
def _query_gradient_tile(
    dq: tl.tensor,
    queries: tl.tensor,
    do: tl.tensor,
    lse_log2: tl.tensor,
    row_delta: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    ahead: tl.tensor,
    first_key: tl.tensor,
    floor: tl.tensor,
    limit: tl.tensor,
    stride_ks: tl.tensor,
    stride_vs: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tl.tensor:
    """Add one key tile's part of dQ (not yet scaled) for BLOCK_M queries."""
    keys = load_tile(k, first_key, floor, limit, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scale_log2 = scale * LOG2_E
    if CAPPED:
        logits = capped(logits, scale, softcap, keys.dtype == tl.float32)
        scale_log2 = softcap * LOG2_E
    weights = tl.exp2(logits * scale_log2 - lse_log2[:, None])
    if MASKED:
        key_ids = (first_key + tl.arange(0, BLOCK_N))[None, :]
        visible = key_ids < high[:, None]
        if MASK == "window" or MASK == "prefix" or MASK == "global" or MASK == "documents":
            visible = visible & (key_ids >= low[:, None])
        if MASK == "prefix" or MASK == "global":
            visible = visible | (key_ids < ahead[:, None])
        weights = tl.where(visible, weights, 0.0)
    values = load_tile(v, first_key, floor, limit, stride_vs, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
    dweights = tl.dot(do, tl.trans(values), input_precision="ieee")
    dlogits = weights * (dweights - row_delta[:, None])
    if CAPPED:
        dlogits = dlogits * (1.0 - logits * logits)
    return tl.dot(dlogits.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["seq_q", "seq_k", "left", "right", "prefix"])
def query_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dout: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    dq_out: tl.tensor,
    table: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    dout_strides: tl.tuple,
    dq_strides: tl.tuple,
    table_strides: tl.tuple,
    num_heads: tl.tensor,
    group: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    prefix: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    MASK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute dQ for BLOCK_M queries of one head."""
    num_tiles = tl.cdiv(seq_q, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    if MASK != "full":
        tile = num_tiles - 1 - tile
    first = tile * BLOCK_M
    q += batch * q_strides[0] + head * q_strides[1]
    k += batch * k_strides[0] + head // group * k_strides[1]
    v += batch * v_strides[0] + head // group * v_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    dq_out += batch * dq_strides[0] + head * dq_strides[1]
    table = table_start(table, table_strides, batch, head, first, seq_k, MASK, MASK_BLOCK)

    rows = first + tl.arange(0, BLOCK_M)
    visits, floor, limit = visits_of_queries(
        first, seq_q, seq_k, left, right, prefix, table, MASK, MASK_BLOCK, BLOCK_M, BLOCK_N
    )
    queries = load_tile(q, first, 0, seq_q, q_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do = load_tile(dout, first, 0, seq_q, dout_strides[2], BLOCK_M, VALUE_DIM, BLOCK_V, True)
    lse_log2 = load_row_values(lse + row * seq_q, first, 0, seq_q, BLOCK_M, True) * LOG2_E
    row_delta = load_row_values(delta + row * seq_q, first, 0, seq_q, BLOCK_M, True)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Whole tiles need no mask, so what each row sees is worked out after them.
    for visit in range(visits[2]):
        key = whole_tile(visit, visits, table, MASK, MASK_BLOCK, BLOCK_N)
        dq = _query_gradient_tile(
            dq, queries, do, lse_log2, row_delta, k, v, rows, rows, rows, key, floor, limit,
            k_strides[2], v_strides[2], scale, softcap, False, MASK, CAPPED,
            HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    low, high = key_run(rows, seq_q, seq_k, left, right, table, MASK)
    ahead = prefix_end(rows, seq_q, seq_k, prefix, MASK)
    for visit in range(visits[7] if PARTIALS else 0):
        key = partial_tile(visit, visits, table, MASK, MASK_BLOCK, BLOCK_N)
        dq = _query_gradient_tile(
            dq, queries, do, lse_log2, row_delta, k, v, low, high, ahead, key, floor, limit,
            k_strides[2], v_strides[2], scale, softcap, True, MASK, CAPPED,
            HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    store_tile(dq_out, dq * scale, first, seq_q, dq_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D)
