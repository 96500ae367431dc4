"""Gradients of exact attention on Hopper, fused: five matrix products per tile, none done twice.

Each program owns 128 keys of one key/value head and walks the queries of its group that see them.
One warp loads by TMA; two warp groups own 64 keys each and keep dK and dV in registers. Scores are
computed transposed (keys x queries), so that P and dS are register operands of dV and dK. dS also
goes to shared memory, where both groups read all of it: each computes one half of the columns of
dQ and adds it by TMA into an fp32 accumulator in global memory.

The order of those additions is not fixed, so dQ is not deterministic in its last bits; dK and dV are.
Query i sees the keys from i + lower (LEFT) to i + upper (RIGHT), as far as those bounds are there.
Query tiles that see none of the program's keys are not visited, those that see all are not masked.

Barriers: K and V have one full barrier each; Q with lse, and dO with delta, a ring of full barriers
each (one arrival and bytes) and a common ring of free ones (one arrival per group); dS has a full and a
free ring (one arrival per group in both). The producer starts with phase 1, which a fresh barrier
passes, the consumers with 0. (A reduce-add of rows wholly before its tensor stopped an H200 with an
illegal instruction; rows past the end are dropped.)
"""

# ruff: noqa: N803, RUF059 (compile-time arguments are upper case, as Triton code has them; the
# tuples that every partition takes are unpacked whole)

from __future__ import annotations

from typing import Any

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
def _locate(sizes):
    """Return this program's batch, key/value head and first key."""
    seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower = sizes
    tiles = gl.cdiv(seq_k, GROUPS * KEYS)
    heads = gl.num_programs(0) // tiles
    head = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    if head >= heads - interleaved:
        # The last programs are dealt out longest first, whichever head they are of.
        program = gl.program_id(0) - (heads - interleaved) * tiles
        head = heads - interleaved + program % interleaved
        tile = program // interleaved
    return head // kv_heads, head % kv_heads, tile * (GROUPS * KEYS)


@gluon.jit
def _query_tiles(first_key, sizes, BM: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr):
    """Return where the query tiles that see the program's keys start, those that see all, and both ends.

    `kernels.attention.schedule.BackwardWork` computes the same.
    """
    seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower = sizes
    end_key = first_key + GROUPS * KEYS
    start = 0
    whole = 0
    end = seq_q
    if RIGHT:
        start = gl.maximum(first_key - upper, 0) // BM * BM
        whole = gl.maximum(end_key - 1 - upper, 0)
    if LEFT:
        end = gl.minimum(seq_q, gl.maximum(gl.minimum(end_key, seq_k) - lower, 0))
    end = gl.maximum(gl.cdiv(end, BM) * BM, start)
    whole = gl.minimum(gl.maximum(gl.cdiv(whole, BM) * BM, start), end)
    whole_end = end
    if LEFT:
        whole_end = gl.minimum(gl.maximum(first_key - lower + 1, 0) // BM * BM, end)
    if end_key > seq_k:
        whole_end = start
    return start, whole, gl.maximum(whole_end, whole), end


@gluon.jit
def _produce(
    q_d, k_d, v_d, do_d, lse_d, delta_d, sizes, tiles, bars,
    BM: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free, ds_full, ds_free = bars
    seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower = sizes
    batch, kv_head, first_key = _locate(sizes)
    start, whole, whole_end, end = _query_tiles(first_key, sizes, BM, RIGHT, LEFT)
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
        for m in range(start, end, BM):
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
def _mask(s, first_key, m, sizes, RIGHT: gl.constexpr, LEFT: gl.constexpr):
    """Set S^T of keys first_key.. and queries m.. to -inf where a query does not see a key."""
    seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower = sizes
    keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    queries = m + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    first = keys * 0
    if RIGHT:
        first = keys - upper
    if LEFT:
        # One comparison for both ends: before the first query the unsigned distance is huge.
        seen = gl.where(keys < seq_k, gl.maximum(keys - lower + 1 - first, 0), 0).to(gl.uint32)
        visible = (queries[None, :] - first[:, None]).to(gl.uint32) < seen[:, None]
    else:
        first = gl.where(keys < seq_k, first, 2**31 - 1)
        visible = queries[None, :] >= first[:, None]
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _weights(s, lse_s, scale_log2, FOLDED: gl.constexpr):
    """P^T = exp2(scale_log2 * S^T - lse)."""
    if FOLDED:
        return gl.exp2(s * scale_log2)
    return gl.exp2(s * scale_log2 - lse_s.load(gl.SliceLayout(0, s.type.layout))[None, :])


# Two products of a value of 16 bits and one of fp32, rounded to 16 bits.
BF16_TIMES = gl.constexpr(
    "{.reg .f32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; "
    "mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.bf16x2.f32 $0, b, a;}"
)
FP16_TIMES = gl.constexpr(
    "{.reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
    "mul.f32 a, a, $2; mul.f32 b, b, $3; cvt.rn.f16x2.f32 $0, b, a;}"
)


@gluon.jit
def _times(p, dp):
    """Return p * dp in p's type of 16 bits; without fp32 copies of p, which would need registers."""
    asm: gl.constexpr = BF16_TIMES if p.dtype == gl.bfloat16 else FP16_TIMES
    return gl.inline_asm_elementwise(asm, "=r,r,f,f", [p, dp], dtype=p.dtype, is_pure=True, pack=2)


@gluon.jit
def _place(step, N: gl.constexpr):
    """Return the slot and the phase of a step in a ring of N."""
    if N == 2:
        return step & 1, step >> 1 & 1
    # Of the step before the first only the slot is read.
    return (step + N) % N, step // N & 1


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
def _start_dp(v, do_s, delta_s, do_full, step, is_there, zero, FOLDED: gl.constexpr):
    """Wait for the dO of a step, if it `is_there`, and start dP^T = V dO^T."""
    idx, phase = _place(step, STAGES)
    mbarrier.wait(do_full.index(idx), phase, pred=is_there)
    return _start_product(v, _rows(do_s.index(idx)), zero, delta_s.index(idx), FOLDED)


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
    step, s, dp_t, adk, adv, k, v, batch, head, m, late_head, late_m, is_masked, is_last, first_key,
    dq_d, scale_log2, sizes, tiles, bars,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DS_STAGES: gl.constexpr, FOLDED: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take in one tile of queries: `s` holds its scores; with FOLDED dP is on its way into `dp_t`.

    Returns those of the next tile, unless this `is_last`. Products are issued so that one runs under all
    that is not a product: dP under the softmax, dV and dK under dS and its way through shared memory,
    the next scores (and dP) under the addition to dQ. dQ is that of the tile before (`late_head`,
    `late_m`), so neither group waits for the other's dS of this tile.
    """
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free, ds_full, ds_free = bars
    idx, phase = _place(step, STAGES)
    slot, slot_phase = _place(step, DS_STAGES)
    dtype: gl.constexpr = q_s.dtype
    s_l: gl.constexpr = s.type.layout
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=adk.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BM], gl.float32, s_l)
    if not FOLDED:
        dp_t = _start_dp(v, do_s, delta_s, do_full, step, True, zero, FOLDED)
    # A branch at run time: loops of their own for masked and other tiles spill more.
    if MASKED and is_masked:
        s = _mask(s, first_key + C * KEYS, m, sizes, RIGHT, LEFT)
    p = _weights(s, lse_s.index(idx), scale_log2, FOLDED)
    p_16 = p.to(dtype)
    if FOLDED:
        # Here, not before the store: ptxas would move the softmax behind dP's wait, and moves nothing
        # across this loop.
        mbarrier.wait(ds_free.index(slot), slot_phase ^ 1)
    dp = warpgroup_mma_wait(0, deps=(dp_t,))
    do = _rows(do_s.index(idx))
    dv_t = warpgroup_mma(gl.convert_layout(p_16, a_l), do, adv, is_async=True)
    if FOLDED:
        ds = _times(p_16, dp)
    else:
        delta = delta_s.index(idx).load(gl.SliceLayout(0, s_l))
        ds = (p * (dp - delta[None, :])).to(dtype)
        mbarrier.wait(ds_free.index(slot), slot_phase ^ 1)
    dk_t = warpgroup_mma(gl.convert_layout(ds, a_l), _rows(q_s.index(idx)), adk, is_async=True)
    ds_s.index(slot * GROUPS + C).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(slot))
    # Before the first tile there is none: a product of stale data, for rows past the end.
    late_slot, late_phase = _place(step - 1, DS_STAGES)
    mbarrier.wait(ds_full.index(late_slot), late_phase, pred=step > 0)
    dq_t = _start_queries(ds_s, k_s, late_slot, C, BM, D)
    # dQ takes one product for each group's keys; all before them are done.
    adv, adk = warpgroup_mma_wait(GROUPS, deps=(dv_t, dk_t))
    next_idx, next_phase = _place(step + 1, STAGES)
    mbarrier.wait(q_full.index(next_idx), next_phase, pred=not is_last)
    # After the last tile these are products of stale data that nobody reads.
    q = _rows(q_s.index(next_idx))
    s_t = _start_scores(k, _rows(k_s.index(C)), q, zero, lse_s.index(next_idx), FOLDED)
    # The scores take a product for what registers hold of K, and one for the rest.
    dq = warpgroup_mma_wait(D // k.shape[1], deps=(dq_t,))
    tma.store_wait(0)
    mbarrier.arrive(free.index(idx))
    mbarrier.arrive(ds_free.index(late_slot), pred=step > 0)
    _add_queries(dq_d, dq_s, dq, batch, late_head, late_m, C)
    if FOLDED:
        dp_t = _start_dp(v, do_s, delta_s, do_full, step + 1, not is_last, zero, FOLDED)
        s = warpgroup_mma_wait(1, deps=(s_t,))
    else:
        dp_t = zero
        s = warpgroup_mma_wait(0, deps=(s_t,))
    return s, dp_t, adk, adv


@gluon.jit
def _consume(
    dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, DS_STAGES: gl.constexpr, FOLDED: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Own 64 keys: walk the queries that see this program's keys, then write dK and dV."""
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free, ds_full, ds_free = bars
    seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower = sizes
    batch, kv_head, first_key = _locate(sizes)
    start, whole, whole_end, end = _query_tiles(first_key, sizes, BM, RIGHT, LEFT)
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
    steps = group * ((end - start) // BM)
    mbarrier.wait(k_full.index(0), 0)
    # In registers they leave shared memory to the other operand; at 128 there is room for half of K.
    k = k.slice(0, 64, 1).load(kv_l)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    q = _rows(q_s.index(0))
    zero = gl.zeros([KEYS, BM], gl.float32, s_l)
    s_t = _start_scores(k, _rows(k_s.index(C)), q, zero, lse_s.index(0), FOLDED)
    mbarrier.wait(v_full.index(0), 0)
    if D == 64:
        v = v.load(kv_l)
    step = steps * 0
    if FOLDED:
        dp_t = _start_dp(v, do_s, delta_s, do_full, step, steps > 0, zero, FOLDED)
        s = warpgroup_mma_wait(1, deps=(s_t,))
    else:
        dp_t = zero
        s = warpgroup_mma_wait(0, deps=(s_t,))
    late_head = step
    late_m = gl.cdiv(seq_q, BM) * BM
    for g in range(group):
        head = kv_head * group + g
        for m in range(start, end, BM):
            s, dp_t, adk, adv = _step(
                step, s, dp_t, adk, adv, k, v, batch, head, m, late_head, late_m,
                (m < whole) | (m >= whole_end), step + 1 == steps, first_key,
                dq_d, scale_log2, sizes, tiles, bars,
                C, BM, D, DS_STAGES, FOLDED, RIGHT, LEFT, MASKED,
            )  # fmt: skip
            step += 1
            late_head = head
            late_m = m
    if FOLDED:
        warpgroup_mma_wait(0, deps=(dp_t,))
    tma.store_wait(0)
    late_slot, late_phase = _place(step - 1, DS_STAGES)
    mbarrier.wait(ds_full.index(late_slot), late_phase, pred=step > 0)
    dq = warpgroup_mma_wait(0, deps=(_start_queries(ds_s, k_s, late_slot, C, BM, D),))
    _add_queries(dq_d, dq_s, dq, batch, late_head, late_m, C)
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


@gluon.jit(
    do_not_specialize=[
        "seq_q",
        "seq_k",
        "kv_heads",
        "group",
        "padded",
        "interleaved",
        "upper",
        "lower",
    ]
)
def backward_kernel(
    q_d, k_d, v_d, do_d, lse_d, delta_d, dq_d, dk_d, dv_d, scale, scale_log2,
    seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower,
    BM: gl.constexpr, D: gl.constexpr, DS_STAGES: gl.constexpr, FOLDED: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, MASKED: gl.constexpr,
    DS_LAYOUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dK and dV of 128 keys and add their share of dQ / scale to the fp32 accumulator.

    Descriptors are 4-D (B, H, S, D), those of lse (base 2) and delta 1-D with `padded` values per
    head. With FOLDED these are -lse / scale and -delta, which the products start from, and dS comes from
    P in 16 bits: fewer registers, and more instructions; and dP is started one step ahead. The grid is
    B x Hkv x ceil(Sk / 128), the key tile running fastest, of the last `interleaved` heads the head.
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
    sizes = (seq_q, seq_k, kv_heads, group, padded, interleaved, upper, lower)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars, 0, BM, D, DS_STAGES, FOLDED, RIGHT, LEFT, MASKED)),
            (_consume, (dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars, 1, BM, D, DS_STAGES, FOLDED, RIGHT, LEFT, MASKED)),
            (_produce, (q_d, k_d, v_d, do_d, lse_d, delta_d, sizes, tiles, bars, BM, RIGHT, LEFT)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
