"""Gradients of exact attention on Hopper, fused: five matrix products per tile, none done twice.

Each program owns 128 keys of one key/value head and walks the queries of its group that see them.
One warp loads by TMA; two warp groups own 64 keys each and keep dK and dV in registers. Scores are
computed transposed (keys x queries), so that P and dS are register operands of dV and dK. dS also
goes to shared memory, where both groups read all of it: each computes one half of the columns of
dQ and adds it by TMA into an fp32 accumulator in global memory.

The order of those additions is not fixed, so dQ is not deterministic in its last bits; dK and dV are.
Causal masks are aligned to the bottom right: query i sees key j when j <= i + Sk - Sq.
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
LOG2_E = tl.constexpr(1.4426950408889634)
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
    seq_q, seq_k, kv_heads, group, padded = sizes
    tiles = gl.cdiv(seq_k, GROUPS * KEYS)
    head = gl.program_id(0) // tiles
    first_key = gl.program_id(0) % tiles * (GROUPS * KEYS)
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
    BM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free = bars
    seq_q, seq_k, kv_heads, group, padded = sizes
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
def _weights(s, lse, scale_log2, first_key, m, sizes, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """P^T = exp2(scale_log2 * S^T - lse) of keys first_key.. and queries m.., 0 where hidden."""
    if MASKED:
        seq_q, seq_k, kv_heads, group, padded = sizes
        layout: gl.constexpr = s.type.layout
        keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))[:, None]
        queries = m + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
        visible = keys < seq_k
        if CAUSAL:
            visible = visible & (keys <= queries + (seq_k - seq_q))
        s = gl.where(visible, s, float("-inf"))
    return gl.exp2(s * scale_log2 - lse[None, :])


@gluon.jit
def _step(
    s, adk, adv, batch, head, m, first_key, left, idx, phase, dq_d, scale_log2, sizes, tiles, bars,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Take in one tile of queries, after which `left` are left.

    With AHEAD, `s` holds its scores on entry, and those of the next tile return.
    """
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free = bars
    dtype: gl.constexpr = q_s.dtype
    s_l: gl.constexpr = s.type.layout
    columns: gl.constexpr = D // GROUPS
    dq_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=adk.type.layout, k_width=2)
    zero = gl.zeros([KEYS, BM], gl.float32, s_l)
    k = _rows(k_s.index(C))
    q = _rows(q_s.index(idx))
    do = _rows(do_s.index(idx))
    if not AHEAD:
        mbarrier.wait(q_full.index(idx), phase)
        s_t = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(idx), phase)
    v = _rows(v_s.index(C))
    dp_t = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s_t,))
    lse = lse_s.index(idx).load(gl.SliceLayout(0, s_l))
    p = _weights(s, lse, scale_log2, first_key + C * KEYS, m, sizes, CAUSAL, MASKED)
    pb = gl.convert_layout(p.to(dtype), a_l)
    dp = warpgroup_mma_wait(0, deps=(dp_t,))
    dv_t = warpgroup_mma(pb, do, adv, is_async=True)
    delta = delta_s.index(idx).load(gl.SliceLayout(0, s_l))
    ds = (p * (dp - delta[None, :])).to(dtype)
    # Two buffers of dS: whoever passes this meeting has read the one before last to its end.
    slot = left % 2 * GROUPS
    ds_s.index(slot + C).store(ds)
    fence_async_shared()
    _meet()
    dq_t = warpgroup_mma(
        ds_s.index(slot).permute((1, 0)), _rows(k_s.index(0)).slice(C * columns, columns, 1),
        gl.zeros([BM, columns], gl.float32, dq_l), use_acc=False, is_async=True,
    )  # fmt: skip
    dq_t = warpgroup_mma(
        ds_s.index(slot + 1).permute((1, 0)), _rows(k_s.index(1)).slice(C * columns, columns, 1),
        dq_t, is_async=True,
    )  # fmt: skip
    dk_t = warpgroup_mma(gl.convert_layout(ds, a_l), q, adk, is_async=True)
    next_idx, next_phase = advance(idx, phase, STAGES)
    if AHEAD:
        mbarrier.wait(q_full.index(next_idx), next_phase, pred=left > 0)
        # After the last tile this is a product of stale data that nobody reads.
        q = _rows(q_s.index(next_idx))
        s_t = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        adv, dq = warpgroup_mma_wait(2, deps=(dv_t, dq_t))
    else:
        adv, dq = warpgroup_mma_wait(1, deps=(dv_t, dq_t))
    tma.store_wait(0)
    _rows(dq_s.index(C)).store(dq)
    fence_async_shared()
    _tma_reduce_add(dq_d, [batch, head, m, C * columns], dq_s.index(C))
    if AHEAD:
        adk, s = warpgroup_mma_wait(0, deps=(dk_t, s_t))
    else:
        adk = warpgroup_mma_wait(0, deps=(dk_t,))
    mbarrier.arrive(free.index(idx))
    return s, adk, adv, next_idx, next_phase


@gluon.jit
def _consume(
    dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Own 64 keys: walk the queries that see this program's keys, then write dK and dV."""
    q_s, do_s, k_s, v_s, ds_s, dq_s, lse_s, delta_s = tiles
    k_full, v_full, q_full, do_full, free = bars
    seq_q, seq_k, kv_heads, group, padded = sizes
    batch, kv_head, first_key, start, masked = _locate(sizes, BM, CAUSAL)
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    g_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    adk = gl.zeros([KEYS, D], gl.float32, g_l)
    adv = gl.zeros([KEYS, D], gl.float32, g_l)
    s = gl.zeros([KEYS, BM], gl.float32, s_l)
    idx = 0
    phase = 0
    left = group * gl.cdiv(gl.maximum(seq_q - start, 0), BM)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(v_full.index(0), 0)
    if AHEAD:
        mbarrier.wait(q_full.index(0), 0, pred=left > 0)
        q = _rows(q_s.index(0))
        s_t = warpgroup_mma(_rows(k_s.index(C)), q.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s_t,))
    for g in range(group):
        head = kv_head * group + g
        if MASKED:
            for m in range(start, masked, BM):
                left -= 1
                s, adk, adv, idx, phase = _step(
                    s, adk, adv, batch, head, m, first_key, left, idx, phase, dq_d, scale_log2,
                    sizes, tiles, bars, C, BM, D, STAGES, AHEAD, CAUSAL, True,
                )  # fmt: skip
        for m in range(masked, seq_q, BM):
            left -= 1
            s, adk, adv, idx, phase = _step(
                s, adk, adv, batch, head, m, first_key, left, idx, phase, dq_d, scale_log2,
                sizes, tiles, bars, C, BM, D, STAGES, AHEAD, CAUSAL, False,
            )  # fmt: skip
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


@gluon.jit(do_not_specialize=["seq_q", "seq_k", "kv_heads", "group", "padded"])
def backward_kernel(
    q_d, k_d, v_d, do_d, lse_d, delta_d, dq_d, dk_d, dv_d, scale, scale_log2,
    seq_q, seq_k, kv_heads, group, padded,
    BM: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, DS_LAYOUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write dK and dV of 128 keys and add their share of dQ / scale to the fp32 accumulator.

    Descriptors are 4-D (B, H, S, D), those of lse (base 2) and delta 1-D with `padded` values per
    head. The grid is B x Hkv x ceil(Sk / 128), the key tile running fastest.
    """
    dtype: gl.constexpr = q_d.dtype
    tiles = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], q_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], do_d.layout),
        gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEYS, D], k_d.layout),
        gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, KEYS, D], v_d.layout),
        gl.allocate_shared_memory(dtype, [2 * GROUPS, KEYS, BM], DS_LAYOUT),
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
    )
    sizes = (seq_q, seq_k, kv_heads, group, padded)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars, 0, BM, D, STAGES, AHEAD, CAUSAL, MASKED)),
            (_consume, (dq_d, dk_d, dv_d, scale, scale_log2, sizes, tiles, bars, 1, BM, D, STAGES, AHEAD, CAUSAL, MASKED)),
            (_produce, (q_d, k_d, v_d, do_d, lse_d, delta_d, sizes, tiles, bars, BM, STAGES, CAUSAL)),
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
    BLOCK: tl.constexpr,
) -> None:
    """Copy lse (to base 2) and delta into rows of `padded` values: +inf and 0 where none is due."""
    blocks = padded // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < seq_q
    values = tl.load(lse + row * seq_q + columns, mask=inside, other=float("-inf"))
    # A query that sees no key has lse -inf; +inf makes its weights 0 instead of NaN.
    values = tl.where(values == float("-inf"), float("inf"), values * LOG2_E)
    tl.store(rows + row * padded + columns, values)
    values = tl.load(delta + row * seq_q + columns, mask=inside, other=0.0)
    tl.store(rows + (num_rows + row) * padded + columns, values)


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
