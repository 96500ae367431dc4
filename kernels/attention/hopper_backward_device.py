"""Gradients of exact attention on Hopper, fused: five matrix products per tile, none done twice.

Each program owns 128 keys of one key/value head and walks the queries of its group that see them.
One warp loads by TMA; two warp groups own 64 keys each and keep dK and dV in registers. Scores are
computed transposed (keys x queries), so that P and dS are register operands of dV and dK. dS also
goes to shared memory, where both groups read all of it: each computes one half of the columns of
dQ and adds it by TMA into an fp32 accumulator in global memory.

The order of those additions is not fixed, so dQ is not deterministic in its last bits; dK and dV are.
Causal masks are aligned to the bottom right: query i sees key j when j <= i + Sk - Sq.

Barriers: K and V have one full barrier each; Q with lse, and dO with delta, a ring of full barriers
each (one arrival and bytes) and a common ring of free ones (one arrival per group); dS has a full and a
free ring (one arrival per group in both). The producer
starts with phase 1, which a fresh barrier passes, the consumers with 0. (A reduce-add of rows wholly
before its tensor stopped an H200 with an illegal instruction; rows past the end are dropped.)
"""

# ruff: noqa: N803, RUF059 (compile-time arguments are upper case, as Triton code has them; the
# tuples that every partition takes are unpacked whole)

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.hopper_common import advance, barriers

KEYS = gl.constexpr(64)  # of one consumer group
GROUPS = gl.constexpr(2)
STAGES = gl.constexpr(2)  # of Q and dO, with what belongs to their rows
SCALE_BLOCK = 2048


@builtin
def _tma_reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add a tile of shared memory to global memory; Gluon has no wrapper of this in 3.6 or 3.7."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@gluon.jit
def _meet():
    """Wait for both consumer groups; Triton itself uses the named barriers 0 to 3."""
    gl.inline_asm_elementwise(
        "bar.sync 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _rows(tile):
    """View a (1, 1, rows, D) tile as (rows, D)."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def _locate(sizes, BM: gl.constexpr, CAUSAL: gl.constexpr):
    """Of this program: batch, key/value head, first key, first query tile, end of masked tiles."""
    seq_q, seq_k, kv_heads, group, padded, interleaved = sizes
    tiles = gl.cdiv(seq_k, GROUPS * KEYS)
    heads = gl.num_programs(0) // tiles
    head = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    if head >= heads - interleaved:
        # The last programs are dealt out longest first, whichever head they are of.
        program = gl.program_id(0) - (heads - interleaved) * tiles
        head = heads - interleaved + program % interleaved
        tile = program // interleaved
    first_key = tile * (GROUPS * KEYS)
    start = 0
    masked = 0
    if CAUSAL:
        # Query i sees the first key from i = first_key - (Sk - Sq) on, and all keys 127 later.
        first = gl.maximum(first_key - (seq_k - seq_q), 0)
        start = first // BM * BM
        masked = gl.maximum(first_key - (seq_k - seq_q) + GROUPS * KEYS - 1, 0)
    if first_key + GROUPS * KEYS > seq_k:
        masked = seq_q
    masked = gl.cdiv(gl.minimum(masked, seq_q), BM) * BM
    return head // kv_heads, head % kv_heads, first_key, start, gl.maximum(masked, start)


@gluon.jit
def _produce(
    q_d, k_d, v_d, do_d, lse_d, delta_d, sizes, tiles, bars,
    BM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free, ds_full, ds_free = bars
    seq_q, seq_k, kv_heads, group, padded, interleaved = sizes
    batch, kv_head, first_key, start, masked = _locate(sizes, BM, CAUSAL)
    mbarrier.expect(k_full.index(0), GROUPS * k_d.block_type.nbytes)
    for c in gl.static_range(GROUPS):
        row = first_key + c * KEYS
        tma.async_copy_global_to_shared(
            k_d, [batch, kv_head, row, 0], k_full.index(0), k_s.index(c)
        )
    mbarrier.expect(v_full.index(0), GROUPS * v_d.block_type.nbytes)
    for c in gl.static_range(GROUPS):
        row = first_key + c * KEYS
        tma.async_copy_global_to_shared(
            v_d, [batch, kv_head, row, 0], v_full.index(0), v_s.index(c)
        )
    idx = 0
    phase = 1
    for g in range(group):
        head = kv_head * group + g
        row_values = (batch * kv_heads * group + head) * padded
        for m in range(start, seq_q, BM):
            mbarrier.wait(free.index(idx), phase)
            full = q_full.index(idx)
            mbarrier.expect(full, q_d.block_type.nbytes + lse_d.block_type.nbytes)
            tma.async_copy_global_to_shared(q_d, [batch, head, m, 0], full, q_s.index(idx))
            tma.async_copy_global_to_shared(lse_d, [row_values + m], full, lse_s.index(idx))
            full = do_full.index(idx)
            mbarrier.expect(full, do_d.block_type.nbytes + delta_d.block_type.nbytes)
            tma.async_copy_global_to_shared(do_d, [batch, head, m, 0], full, do_s.index(idx))
            tma.async_copy_global_to_shared(delta_d, [row_values + m], full, delta_s.index(idx))
            idx, phase = advance(idx, phase, STAGES)


@gluon.jit
def _weights(
    s, lse_s, scale_log2, first_key, m, sizes,
    FOLDED: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """P^T = exp2(scale_log2 * S^T - lse) of keys first_key.. and queries m.., 0 where hidden."""
    if MASKED:
        seq_q, seq_k, kv_heads, group, padded, interleaved = sizes
        layout: gl.constexpr = s.type.layout
        keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
        queries = m + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
        visible = keys < seq_k
        if CAUSAL:
            visible = visible & (keys <= queries + (seq_k - seq_q))
        s = gl.where(visible, s, float("-inf"))
    if FOLDED:
        return gl.exp2(s * scale_log2)
    return gl.exp2(s * scale_log2 - lse_s.load(gl.SliceLayout(0, s.type.layout))[None, :])


@gluon.jit
def _start_product(a, b_t, zero, rows_s, FOLDED: gl.constexpr):
    """Start a b^T, with the row value of each of its columns added where these are folded in."""
    if FOLDED:
        zero = zero + rows_s.load(gl.SliceLayout(0, zero.type.layout))[None, :]
    return warpgroup_mma(a, b_t.permute((1, 0)), zero, use_acc=FOLDED, is_async=True)


@gluon.jit
def _start_scores(k, k_s, q, zero, lse_s, FOLDED: gl.constexpr):
    """Start S^T = K Q^T, of which registers hold what they have room for of K's columns."""
    held: gl.constexpr = k.shape[1]
    s_t = _start_product(k, q.slice(0, held, 1), zero, lse_s, FOLDED)
    if held < q.shape[1]:
        rest: gl.constexpr = q.shape[1] - held
        q_t = q.slice(held, rest, 1).permute((1, 0))
        s_t = warpgroup_mma(k_s.slice(held, rest, 1), q_t, s_t, is_async=True)
    return s_t


@gluon.jit
def _start_queries(ds_s, k_s, slot, C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr):
    """Start this group's half of the columns of dQ = dS K, over the keys of both groups."""
    columns: gl.constexpr = D // GROUPS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )
    dq_t = gl.zeros([BM, columns], gl.float32, layout)
    for c in gl.static_range(GROUPS):
        ds = ds_s.index(slot * GROUPS + c).permute((1, 0))
        k = _rows(k_s.index(c)).slice(C * columns, columns, 1)
        dq_t = warpgroup_mma(ds, k, dq_t, use_acc=c > 0, is_async=True)
    return dq_t


@gluon.jit
def _add_queries(dq_d, dq_s, dq, batch, head, m, C: gl.constexpr):
    """Add this group's half of a dQ tile to the accumulator; rows past its end are dropped."""
    _rows(dq_s.index(C)).store(dq)
    fence_async_shared()
    _tma_reduce_add(dq_d, [batch, head, m, C * dq_s.shape[4]], dq_s.index(C))


@gluon.jit
def _step(
    s, adk, adv, state, k, v, batch, head, m, first_key, left, dq_d, scale_log2, sizes, tiles, bars,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DS_STAGES: gl.constexpr, FOLDED: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take in one tile of queries, whose scores `s` holds; return those of the next, if any is `left`.

    Products are issued so that one runs under all that is not a product: dP under the softmax, dV and
    dK under dS and its way through shared memory, the next scores under the addition to dQ. dQ is that
    of the tile before, so neither group waits for the other's dS of this tile.
    """
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free, ds_full, ds_free = bars
    step, slot, slot_phase, dq_slot, dq_phase, dq_head, dq_m = state
    seq_q, seq_k, kv_heads, group, padded, interleaved = sizes
    idx = step & 1
    phase = (step >> 1) & 1
    if DS_STAGES == STAGES:
        # The slots are those of Q and need no registers.
        slot, slot_phase, dq_slot, dq_phase = idx, phase, idx ^ 1, ((step - 1) >> 1) & 1
    dtype: gl.constexpr = q_s.dtype
    s_l: gl.constexpr = s.type.layout
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=adk.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BM], gl.float32, s_l)
    do = _rows(do_s.index(idx))
    mbarrier.wait(do_full.index(idx), phase)
    dp_t = _start_product(v, do, zero, delta_s.index(idx), FOLDED)
    p = _weights(
        s, lse_s.index(idx), scale_log2, first_key + C * KEYS, m, sizes, FOLDED, CAUSAL, MASKED
    )
    pb = gl.convert_layout(p.to(dtype), a_l)
    dp = warpgroup_mma_wait(0, deps=(dp_t,))
    dv_t = warpgroup_mma(pb, do, adv, is_async=True)
    if not FOLDED:
        dp = dp - delta_s.index(idx).load(gl.SliceLayout(0, s_l))[None, :]
    ds = (p * dp).to(dtype)
    dk_t = warpgroup_mma(gl.convert_layout(ds, a_l), _rows(q_s.index(idx)), adk, is_async=True)
    mbarrier.wait(ds_free.index(slot), slot_phase ^ 1)
    ds_s.index(slot * GROUPS + C).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot))
    # Before the first tile there is none: a product of stale data, for rows past the end.
    mbarrier.wait(ds_full.index(dq_slot), dq_phase, pred=dq_m < seq_q)
    dq_t = _start_queries(ds_s, k_s, dq_slot, C, BM, D)
    # dQ takes one product for each group's keys; all before them are done.
    adv, adk = warpgroup_mma_wait(GROUPS, deps=(dv_t, dk_t))
    next_idx = idx ^ 1
    mbarrier.wait(q_full.index(next_idx), ((step + 1) >> 1) & 1, pred=left > 0)
    # After the last tile this is a product of stale data that nobody reads.
    q = _rows(q_s.index(next_idx))
    s_t = _start_scores(k, _rows(k_s.index(C)), q, zero, lse_s.index(next_idx), FOLDED)
    # The scores take a product for what registers hold of K, and one for the rest.
    dq = warpgroup_mma_wait(D // k.shape[1], deps=(dq_t,))
    tma.store_wait(0)
    mbarrier.arrive(free.index(idx))
    mbarrier.arrive(ds_free.index(dq_slot), pred=dq_m < seq_q)
    _add_queries(dq_d, dq_s, dq, batch, dq_head, dq_m, C)
    s = warpgroup_mma_wait(0, deps=(s_t,))
    next_slot, next_slot_phase = advance(slot, slot_phase, DS_STAGES)
    state = (step + 1, next_slot, next_slot_phase, slot, slot_phase, head, m)
    return s, adk, adv, state


@gluon.jit
def _consume(
    dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DS_STAGES: gl.constexpr, FOLDED: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Own 64 keys: walk the queries that see this program's keys, then write dK and dV."""
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free, ds_full, ds_free = bars
    seq_q, seq_k, kv_heads, group, padded, interleaved = sizes
    batch, kv_head, first_key, start, masked = _locate(sizes, BM, CAUSAL)
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    g_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    kv_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=s_l, k_width=2)
    adk = gl.zeros([KEYS, D], gl.float32, g_l)
    adv = gl.zeros([KEYS, D], gl.float32, g_l)
    k = _rows(k_s.index(C))
    v = _rows(v_s.index(C))
    left = group * gl.cdiv(gl.maximum(seq_q - start, 0), BM)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(v_full.index(0), 0)
    # In registers they leave shared memory to the other operand; at 128 there is room for half of K.
    k = k.slice(0, 64, 1).load(kv_l)
    if D == 64:
        v = v.load(kv_l)
    mbarrier.wait(q_full.index(0), 0, pred=left > 0)
    q = _rows(q_s.index(0))
    zero = gl.zeros([KEYS, BM], gl.float32, s_l)
    s_t = _start_scores(k, _rows(k_s.index(C)), q, zero, lse_s.index(0), FOLDED)
    s = warpgroup_mma_wait(0, deps=(s_t,))
    start_step = left * 0
    state = (
        start_step,
        start_step,
        start_step,
        start_step,
        start_step,
        start_step,
        gl.cdiv(seq_q, BM) * BM,
    )
    for g in range(group):
        head = kv_head * group + g
        if MASKED:
            for m in range(start, masked, BM):
                left -= 1
                s, adk, adv, state = _step(
                    s, adk, adv, state, k, v, batch, head, m, first_key, left, dq_d, scale_log2, sizes,
                    tiles, bars, C, BM, D, DS_STAGES, FOLDED, CAUSAL, True,
                )  # fmt: skip
        for m in range(masked, seq_q, BM):
            left -= 1
            s, adk, adv, state = _step(
                s, adk, adv, state, k, v, batch, head, m, first_key, left, dq_d, scale_log2, sizes,
                tiles, bars, C, BM, D, DS_STAGES, FOLDED, CAUSAL, False,
            )  # fmt: skip
    tma.store_wait(0)
    step, slot, slot_phase, dq_slot, dq_phase, dq_head, dq_m = state
    if DS_STAGES == STAGES:
        dq_slot, dq_phase = (step - 1) & 1, ((step - 1) >> 1) & 1
    mbarrier.wait(ds_full.index(dq_slot), dq_phase, pred=dq_m < seq_q)
    dq = warpgroup_mma_wait(0, deps=(_start_queries(ds_s, k_s, dq_slot, C, BM, D),))
    _add_queries(dq_d, dq_s, dq, batch, dq_head, dq_m, C)
    tma.store_wait(0)
    # K and V have been read to the end by both groups: their room takes dK and dV.
    _meet()
    dtype: gl.constexpr = q_s.dtype
    _rows(v_s.index(C)).store(adv.to(dtype))
    _rows(k_s.index(C)).store((adk * scale).to(dtype))
    fence_async_shared()
    row = first_key + C * KEYS
    tma.async_copy_shared_to_global(dv_d, [batch, kv_head, row, 0], v_s.index(C))
    tma.async_copy_shared_to_global(dk_d, [batch, kv_head, row, 0], k_s.index(C))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seq_q", "seq_k", "kv_heads", "group", "padded", "interleaved"])
def backward_kernel(
    q_d, k_d, v_d, do_d, lse_d, delta_d, dq_d, dk_d, dv_d, scale, scale_log2,
    seq_q, seq_k, kv_heads, group, padded, interleaved,
    BM: gl.constexpr, D: gl.constexpr, DS_STAGES: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, DS_LAYOUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dK and dV of 128 keys and add their share of dQ / scale to the fp32 accumulator.

    Descriptors are 4-D (B, H, S, D), those of lse (base 2) and delta 1-D with `padded` values per
    head. With FOLDED these are -lse / scale and -delta, which the products start from: fewer registers,
    and more instructions. The grid is B x Hkv x ceil(Sk / 128), the key tile running fastest, of the last `interleaved`
    heads the head.
    """
    dtype: gl.constexpr = q_d.dtype
    tiles = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], q_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], do_d.layout),
        gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEYS, D], k_d.layout),
        gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEYS, D], v_d.layout),
        gl.allocate_shared_memory(dtype, [DS_STAGES * GROUPS, KEYS, BM], DS_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [GROUPS, 1, 1, BM, D // GROUPS], dq_d.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_d.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_d.layout),
    )
    bars = (
        barriers(1, 1),
        barriers(1, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, GROUPS),
        barriers(DS_STAGES, GROUPS),
        barriers(DS_STAGES, GROUPS),
    )
    sizes = (seq_q, seq_k, kv_heads, group, padded, interleaved)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars, 0, BM, D, DS_STAGES, FOLDED, CAUSAL, MASKED)),
            (_consume, (dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars, 1, BM, D, DS_STAGES, FOLDED, CAUSAL, MASKED)),
            (_produce, (q_d, k_d, v_d, do_d, lse_d, delta_d, sizes, tiles, bars, BM, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@triton.jit
def pad_rows_kernel(
    lse: tl.tensor,
    delta: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    seq_q: tl.tensor,
    padded: tl.tensor,
    lse_factor: tl.tensor,
    delta_factor: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy lse and delta times a factor into rows of `padded` values, whose end weighs nothing.

    There, and where a query sees no key, lse is +inf times its factor's sign; delta is 0 at the end.
    """
    blocks = padded // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < seq_q
    values = tl.load(lse + row * seq_q + columns, mask=inside, other=float("-inf"))
    # A query that sees no key has lse -inf; +inf makes its weights 0 instead of NaN.
    values = tl.where(values == float("-inf"), float("inf"), values) * lse_factor
    tl.store(rows + row * padded + columns, values)
    values = tl.load(delta + row * seq_q + columns, mask=inside, other=0.0)
    tl.store(rows + (num_rows + row) * padded + columns, values * delta_factor)


@triton.jit
def scale_kernel(
    accumulator: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write accumulator * scale in the type of `out`; both are flat, with `count` elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(accumulator + index, mask=index < count)
    tl.store(out + index, (values * scale).to(out.dtype.element_ty), mask=index < count)
