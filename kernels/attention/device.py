"""Triton device code of exact attention, forward: the online softmax, and the backward's row term.

Shape letters: B batch, H query heads, G query heads per key/value head, S sequence, D head size of
queries and keys, V of values. Each program owns one tile of queries and walks the keys; nothing is
accumulated across programs, so every result is deterministic. Logits live in the exp2 domain:
`scale_log2 = scale * log2(e)`. Addresses are int64 wherever a stride meets an index; the last
dimension must be contiguous. Without PARTIALS all tiles are seen whole: a full mask that fills its tiles.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.device_tiles import (
    LN_2,
    LOG2_E,
    capped,
    key_run,
    load_tile,
    partial_tile,
    prefix_end,
    store_tile,
    table_start,
    visits_of_queries,
    whole_tile,
)


@triton.jit
def _attend_tile(
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
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
    scale_log2: tl.tensor,
    softcap: tl.tensor,
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold one key tile into the online softmax state (acc, peak, total) of BLOCK_M queries.

    They see keys low..high and, with a prefix, those before `ahead`.
    """
    keys = load_tile(k, first_key, floor, limit, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if CAPPED:
        logits = capped(logits, scale_log2 * LN_2, softcap, q.dtype == tl.float32)
        scale_log2 = softcap * LOG2_E
    if MASKED:
        key_ids = (first_key + tl.arange(0, BLOCK_N))[None, :]
        visible = key_ids < high[:, None]
        if MASK == "window" or MASK == "prefix" or MASK == "global" or MASK == "documents":
            visible = visible & (key_ids >= low[:, None])
        if MASK == "prefix" or MASK == "global":
            visible = visible | (key_ids < ahead[:, None])
        logits = tl.where(visible, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * scale_log2)
    # A row that has seen no key yet has peak -inf, and -inf - -inf would be NaN.
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(logits * scale_log2 - anchor[:, None])
    rescale = tl.exp2(peak - anchor)
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    values = load_tile(v, first_key, floor, limit, stride_vs, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, new_peak, total


@triton.jit(do_not_specialize=["seq_q", "seq_k", "left", "right", "prefix"])
def forward_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    table: tl.tensor,
    sinks: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    out_strides: tl.tuple,
    table_strides: tl.tuple,
    num_heads: tl.tensor,
    group: tl.tensor,
    seq_q: tl.tensor,
    seq_k: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    prefix: tl.tensor,
    scale_log2: tl.tensor,
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
    """Compute `out` and `lse` (fp32, B x H x Sq, contiguous) for BLOCK_M queries of one head."""
    num_tiles = tl.cdiv(seq_q, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    if MASK != "full":
        # The last queries see the most keys: start them first, so that short tiles fill the tail.
        tile = num_tiles - 1 - tile
    first = tile * BLOCK_M
    q += batch * q_strides[0] + head * q_strides[1]
    k += batch * k_strides[0] + head // group * k_strides[1]
    v += batch * v_strides[0] + head // group * v_strides[1]
    table = table_start(table, table_strides, batch, head, first, seq_k, MASK, MASK_BLOCK)
    rows = first + tl.arange(0, BLOCK_M)
    visits, floor, limit = visits_of_queries(
        first, seq_q, seq_k, left, right, prefix, table, MASK, MASK_BLOCK, BLOCK_M, BLOCK_N
    )
    queries = load_tile(q, first, 0, seq_q, q_strides[2], BLOCK_M, HEAD_DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # A sink is one more logit, of a key whose value is 0.
        peak = total + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    # Whole tiles need no mask, so what each row sees is worked out after them.
    for visit in range(visits[2]):
        key = whole_tile(visit, visits, table, MASK, MASK_BLOCK, BLOCK_N)
        acc, peak, total = _attend_tile(
            acc, peak, total, queries, k, v, rows, rows, rows, key, floor, limit,
            k_strides[2], v_strides[2], scale_log2, softcap, False, MASK, CAPPED,
            HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    low, high = key_run(rows, seq_q, seq_k, left, right, table, MASK)
    ahead = prefix_end(rows, seq_q, seq_k, prefix, MASK)
    for visit in range(visits[7] if PARTIALS else 0):
        key = partial_tile(visit, visits, table, MASK, MASK_BLOCK, BLOCK_N)
        acc, peak, total = _attend_tile(
            acc, peak, total, queries, k, v, low, high, ahead, key, floor, limit,
            k_strides[2], v_strides[2], scale_log2, softcap, True, MASK, CAPPED,
            HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    # A query that saw no key has total 0 and peak -inf: output 0, log-sum-exp -inf.
    total = tl.where(total > 0, total, 1.0)
    tl.store(lse + row * seq_q + rows, (peak + tl.log2(total)) * LN_2, mask=rows < seq_q)
    out += batch * out_strides[0] + head * out_strides[1]
    store_tile(out, acc / total[:, None], first, seq_q, out_strides[2], BLOCK_M, VALUE_DIM, BLOCK_V)


@triton.jit(do_not_specialize=["seq_q"])
def delta_kernel(
    out: tl.tensor,
    dout: tl.tensor,
    delta: tl.tensor,
    out_strides: tl.tuple,
    dout_strides: tl.tuple,
    num_heads: tl.tensor,
    seq_q: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Compute delta (fp32, B x H x Sq), the row term of the softmax backward: sum of out * dout."""
    num_tiles = tl.cdiv(seq_q, BLOCK_M)
    first = tl.program_id(0) % num_tiles * BLOCK_M
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    out += batch * out_strides[0] + head * out_strides[1]
    dout += batch * dout_strides[0] + head * dout_strides[1]
    o = load_tile(out, first, 0, seq_q, out_strides[2], BLOCK_M, VALUE_DIM, BLOCK_V, True)
    do = load_tile(dout, first, 0, seq_q, dout_strides[2], BLOCK_M, VALUE_DIM, BLOCK_V, True)
    rows = first + tl.arange(0, BLOCK_M)
    products = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + row * seq_q + rows, products, mask=rows < seq_q)
