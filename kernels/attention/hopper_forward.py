"""Attention forward for Hopper, in Gluon: TMA producer, warp-specialised consumers, persistent tiles.

One program runs per multiprocessor and walks its column of a tile list made on the host
(`kernels.attention.schedule`). In it one warp loads tiles by TMA; two (head size up to 128) or three
(up to 64) warp groups of 64 query rows each keep their weights P in registers and compute the softmax
of one key block while the tensor cores multiply the next. Key blocks run from the last visible one
down, so that in all but the odd alignments only the first block is masked. The first product of the
next tile is under way while a tile's output is scaled and stored.

Barriers: K and V have separate full (one arrival and bytes) and free (one arrival per group) rings.
The producer starts with phase 1, which a fresh barrier passes, the consumers with 0; index and phase
are carried across tiles. A group that does not need a block still waits for it and frees it.
"""

# ruff: noqa: N803, RUF059 (compile-time arguments are upper case, and tuples of arguments are
# unpacked whole, as Triton code has them)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.hopper_common import advance, barriers

LN_2 = gl.constexpr(0.6931471805599453)
MASK_NONE = gl.constexpr(0)
MASK_FIRST = gl.constexpr(1)
MASK_EVERY = gl.constexpr(2)


@gluon.jit
def _visible_blocks(end_row, seq_q, seq_k, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the key blocks that rows before `end_row` see, at least one (masked if they see none)."""
    end = seq_k
    if CAUSAL:
        end = gl.minimum(seq_k, end_row + seq_k - seq_q)
    return gl.maximum(gl.cdiv(end, BN), 1)


@gluon.jit
def _own_list(lists):
    """Return a pointer to this program's tiles, and how many they are (`schedule.forward_lists`)."""
    first = gl.load(lists + gl.program_id(0))
    count = gl.load(lists + gl.program_id(0) + 1) - first
    return lists + gl.num_programs(0) + 1 + first, count


@gluon.jit
def _locate(order, i, sizes):
    """Return the head, counted over the whole batch, and the row tile of this program's tile i."""
    seq_q, seq_k, heads, group, num_row_tiles = sizes
    tile = gl.load(order + i)
    return tile // num_row_tiles, tile % num_row_tiles


@gluon.jit
def _produce(
    q_d, k_d, v_d, lists, sizes, tiles, bars,
    NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Load Q once and K, V block by block for each tile of this program."""
    seq_q, seq_k, heads, group, num_row_tiles = sizes
    q_s, k_s, v_s, o_s = tiles
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    idx = 0
    phase = 1
    order, count = _own_list(lists)
    for i in range(count):
        batch_head, m = _locate(order, i, sizes)
        batch = batch_head // heads
        head = batch_head % heads
        blocks = _visible_blocks((m + 1) * NC * BM, seq_q, seq_k, BN, CAUSAL)
        kv_head = head // group
        key = blocks * BN
        for j in range(blocks):
            key -= BN
            mbarrier.wait(k_free.index(idx), phase)
            mbarrier.expect(k_full.index(idx), k_d.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_d, [batch, kv_head, key, 0], k_full.index(idx), k_s.index(idx)
            )
            if j == 0:
                for c in gl.static_range(NC):
                    slot = 2 * c + (i & 1)
                    mbarrier.wait(q_free.index(slot), (i >> 1 & 1) ^ 1)
                    mbarrier.expect(q_full.index(slot), q_d.block_type.nbytes)
                    row = (m * NC + c) * BM
                    tma.async_copy_global_to_shared(
                        q_d, [batch, head, row, 0], q_full.index(slot), q_s.index(slot)
                    )
            mbarrier.wait(v_free.index(idx), phase)
            mbarrier.expect(v_full.index(idx), v_d.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_d, [batch, kv_head, key, 0], v_full.index(idx), v_s.index(idx)
            )
            idx, phase = advance(idx, phase, STAGES)


@gluon.jit
def _open_tile(
    order, i, sizes, bars, idx, phase, v_idx, v_phase,
    C: gl.constexpr, NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Wait for the Q and the first K of group C in tile i.

    What the loop over tiles carries is kept small: Triton 3.6 lost one of two block numbers that it
    carried side by side, and later tiles walked the first tile's number of blocks
    (`inner_counts_follow_the_tile` in the tests looks for it).
    """
    seq_q, seq_k, heads, group, num_row_tiles = sizes
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    batch_head, m = _locate(order, i, sizes)
    row = (m * NC + C) * BM
    blocks = _visible_blocks((m + 1) * NC * BM, seq_q, seq_k, BN, CAUSAL)
    if CAUSAL:
        own = _visible_blocks(row + BM, seq_q, seq_k, BN, CAUSAL)
        # A block that only later groups see: at most one, since NC * BM <= BN + BM.
        if blocks > own:
            mbarrier.wait(k_full.index(idx), phase)
            mbarrier.arrive(k_free.index(idx))
            idx, phase = advance(idx, phase, STAGES)
            mbarrier.wait(v_full.index(v_idx), v_phase)
            mbarrier.arrive(v_free.index(v_idx))
            v_idx, v_phase = advance(v_idx, v_phase, STAGES)
            blocks -= 1
    mbarrier.wait(q_full.index(2 * C + (i & 1)), i >> 1 & 1)
    mbarrier.wait(k_full.index(idx), phase)
    return batch_head, row, blocks, idx, phase, v_idx, v_phase


@gluon.jit
def _mask(
    s, row, first_key, seq_q, seq_k,
    BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, s_l: gl.constexpr,
):  # fmt: skip
    """Set the scores of invisible keys to -inf."""
    if CAUSAL:
        # No row before seq_q sees past the last key; later rows are not stored.
        last_key = row + seq_k - seq_q + gl.arange(0, BM, gl.SliceLayout(1, s_l))
    else:
        last_key = gl.full([BM], 0, gl.int32, gl.SliceLayout(1, s_l)) + (seq_k - 1)
        # A zero that the compiler cannot see through: were the mask known to be the same in every
        # tile, it would be kept in registers, and those spill.
        first_key = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [first_key], dtype=gl.int32, is_pure=False, pack=1
        )
    keys = first_key + gl.arange(0, BN, gl.SliceLayout(0, s_l))
    return gl.where(last_key[:, None] >= keys[None, :], s, float("-inf"))


@gluon.jit
def _anchor(m, MASK: gl.constexpr):
    """Return what to subtract from a row's scores: its peak, or 0 where it has seen no key yet."""
    if MASK == MASK_EVERY:
        m = gl.where(m == float("-inf"), 0.0, m)
    return m


@gluon.jit
def _lane_sum(p, BM: gl.constexpr, BN: gl.constexpr):
    """Sum the columns that one thread holds; the four lanes of a row are added once, at the end."""
    return gl.sum(gl.sum(p.reshape([BM, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _store_out(
    o_d, acc, sums, batch_head, row, sizes, o_s,
    C: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, MASK: gl.constexpr,
    r_l: gl.constexpr, ro_l: gl.constexpr,
):  # fmt: skip
    """Divide a tile's output by its row sums and store it."""
    seq_q, seq_k, heads, group, num_row_tiles = sizes
    total = gl.convert_layout(gl.sum(sums, 1), r_l)
    inverse = 1 / total
    if MASK == MASK_EVERY:
        inverse = gl.where(total > 0, inverse, 0.0)
    acc = acc * gl.convert_layout(inverse, ro_l)[:, None]
    tma.store_wait(0)
    o_s.index(C).reshape([BM, D]).store(acc.to(o_d.dtype))
    fence_async_shared()
    coordinates = [batch_head // heads, batch_head % heads, row, 0]
    tma.async_copy_shared_to_global(o_d, coordinates, o_s.index(C))


@gluon.jit
def _store_lse(lse_ptr, m, sums, batch_head, row, sizes, BM: gl.constexpr, r_l: gl.constexpr):
    """Store the natural logarithm of the row sums; -inf for a row that saw no key."""
    seq_q, seq_k, heads, group, num_row_tiles = sizes
    total = gl.convert_layout(gl.sum(sums, 1), r_l)
    rows = row + gl.arange(0, BM, r_l)
    first = batch_head.to(gl.int64) * seq_q
    gl.store(lse_ptr + first + rows, (m + gl.log2(total)) * LN_2, mask=rows < seq_q)


@gluon.jit
def _await_early(v_full, idx, phase, D: gl.constexpr):
    """Wait for a block's values before the product of those before is done, with 64 columns.

    ptxas moves the softmax behind the wait for that product, but not across this one. Measured on an
    H200: 1.4 to 5 % of the time with 64 columns; with 128 it costs 2 to 5 % under a full mask.
    """
    if D == 64:
        mbarrier.wait(v_full.index(idx), phase)


@gluon.jit
def _start_values(
    pb, v_s, v_full, idx, phase, acc, BN: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Start adding P V of a block."""
    if D != 64:
        mbarrier.wait(v_full.index(idx), phase)
    return warpgroup_mma(pb, v_s.index(idx).reshape([BN, D]), acc, is_async=True)


@gluon.jit
def _consume(
    o_d, lse_ptr, scale_log2, lists, sizes, tiles, bars,
    C: gl.constexpr, NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Attend the BM query rows of group C in each tile of this program."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    o_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_l, k_width=2)
    r_l: gl.constexpr = gl.SliceLayout(1, s_l)
    ro_l: gl.constexpr = gl.SliceLayout(1, o_l)
    seq_q, seq_k, heads, group, num_row_tiles = sizes
    q_s, k_s, v_s, o_s = tiles
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    zero = gl.zeros([BM, BN], gl.float32, s_l)
    order, count = _own_list(lists)
    idx = 0
    phase = 0
    batch_head, row, blocks, idx, phase, v_idx, v_phase = _open_tile(
        order, 0, sizes, bars, idx, phase, idx, phase, C, NC, BM, BN, STAGES, CAUSAL
    )
    s_t = _scores(q_s.index(2 * C), k_s.index(idx), zero, BM, BN, D)
    for i in range(count):
        q = q_s.index(2 * C + (i & 1))
        s = warpgroup_mma_wait(0, deps=(s_t,))
        mbarrier.arrive(k_free.index(idx))
        if MASK != MASK_NONE:
            s = _mask(s, row, (blocks - 1) * BN, seq_q, seq_k, BM, BN, CAUSAL, s_l)
        m = gl.max(s, 1) * scale_log2
        p = gl.exp2(s * scale_log2 - _anchor(m, MASK)[:, None])
        sums = _lane_sum(p, BM, BN)
        pb = gl.convert_layout(p.to(o_d.dtype), p_l)
        acc = gl.zeros([BM, D], gl.float32, o_l)
        _await_early(v_full, v_idx, v_phase, D)
        for j in range(1, blocks):
            idx, phase = advance(idx, phase, STAGES)
            mbarrier.wait(k_full.index(idx), phase)
            s_t = _scores(q, k_s.index(idx), zero, BM, BN, D)
            acc_t = _start_values(pb, v_s, v_full, v_idx, v_phase, acc, BN, D)
            s = warpgroup_mma_wait(1, deps=(s_t,))
            mbarrier.arrive(k_free.index(idx))
            if MASK == MASK_EVERY:
                s = _mask(s, row, (blocks - 1 - j) * BN, seq_q, seq_k, BM, BN, CAUSAL, s_l)
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            alpha = gl.exp2(m - _anchor(m_new, MASK))
            p = gl.exp2(s * scale_log2 - _anchor(m_new, MASK)[:, None])
            lane_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))
            sums = sums * lane_alpha[:, None] + _lane_sum(p, BM, BN)
            m = m_new
            v_next, v_phase = advance(v_idx, v_phase, STAGES)
            _await_early(v_full, v_next, v_phase, D)
            acc = warpgroup_mma_wait(0, deps=(acc_t,))
            mbarrier.arrive(v_free.index(v_idx))
            v_idx = v_next
            acc = acc * gl.convert_layout(alpha, ro_l)[:, None]
            pb = gl.convert_layout(p.to(o_d.dtype), p_l)
        mbarrier.arrive(q_free.index(2 * C + (i & 1)))
        acc_t = _start_values(pb, v_s, v_full, v_idx, v_phase, acc, BN, D)
        v_last = v_idx
        out_head, out_row = batch_head, row
        idx, phase = advance(idx, phase, STAGES)
        v_idx, v_phase = advance(v_idx, v_phase, STAGES)
        if i + 1 < count:
            batch_head, row, blocks, idx, phase, v_idx, v_phase = _open_tile(
                order, i + 1, sizes, bars, idx, phase, v_idx, v_phase, C, NC, BM, BN, STAGES, CAUSAL
            )
        # After the last tile this is a product of stale data that nobody reads.
        s_t = _scores(q_s.index(2 * C + (i & 1 ^ 1)), k_s.index(idx), zero, BM, BN, D)
        _store_lse(lse_ptr, m, sums, out_head, out_row, sizes, BM, r_l)
        acc = warpgroup_mma_wait(1, deps=(acc_t,))
        mbarrier.arrive(v_free.index(v_last))
        _store_out(o_d, acc, sums, out_head, out_row, sizes, o_s, C, BM, D, MASK, r_l, ro_l)
    warpgroup_mma_wait(0, deps=(s_t,))
    tma.store_wait(0)


@gluon.jit
def _scores(q, k, zero, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
    """Start Q K^T of one block."""
    keys = k.reshape([BN, D]).permute((1, 0))
    return warpgroup_mma(q.reshape([BM, D]), keys, zero, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["seq_q", "seq_k", "heads", "group", "num_row_tiles"])
def forward_kernel(
    q_d, k_d, v_d, o_d, lse_ptr, lists, scale_log2, seq_q, seq_k, heads, group, num_row_tiles,
    NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute out and lse: NC groups of BM query rows, BN keys per block, D columns."""
    sizes = (seq_q, seq_k, heads, group, num_row_tiles)
    dtype: gl.constexpr = q_d.dtype
    tiles = (
        gl.allocate_shared_memory(dtype, [2 * NC, 1, 1, BM, D], q_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], v_d.layout),
        gl.allocate_shared_memory(dtype, [NC, 1, 1, BM, D], o_d.layout),
    )
    bars = (
        barriers(2 * NC, 1),
        barriers(2 * NC, 1),
        barriers(STAGES, 1),
        barriers(STAGES, NC),
        barriers(STAGES, 1),
        barriers(STAGES, NC),
    )
    fence_async_shared()
    # Argument tuples are spelled out: adding tuples would lose the compile-time arguments.
    if NC == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    o_d, lse_ptr, scale_log2, lists, sizes, tiles, bars,
                    0, NC, BM, BN, D, STAGES, CAUSAL, MASK,
                )),
                (_consume, (
                    o_d, lse_ptr, scale_log2, lists, sizes, tiles, bars,
                    1, NC, BM, BN, D, STAGES, CAUSAL, MASK,
                )),
                (_produce, (q_d, k_d, v_d, lists, sizes, tiles, bars, NC, BM, BN, STAGES, CAUSAL)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    o_d, lse_ptr, scale_log2, lists, sizes, tiles, bars,
                    0, NC, BM, BN, D, STAGES, CAUSAL, MASK,
                )),
                (_consume, (
                    o_d, lse_ptr, scale_log2, lists, sizes, tiles, bars,
                    1, NC, BM, BN, D, STAGES, CAUSAL, MASK,
                )),
                (_consume, (
                    o_d, lse_ptr, scale_log2, lists, sizes, tiles, bars,
                    2, NC, BM, BN, D, STAGES, CAUSAL, MASK,
                )),
                (_produce, (q_d, k_d, v_d, lists, sizes, tiles, bars, NC, BM, BN, STAGES, CAUSAL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
