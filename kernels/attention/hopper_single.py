"""Attention forward for Hopper, in Gluon: windows, large and unequal heads, softcaps and sinks.

What `kernels.attention.hopper_forward` does not take. One program runs per multiprocessor. Where
late rows see more keys than early ones (RIGHT without LEFT) it walks its part of a list of row tiles
(`kernels.attention.schedule`), else every gl.num_programs(0)-th tile from its own on. It carries a
single number from tile to tile, how many blocks came before: where a block lies in the rings follows
from it. One warp loads by TMA; two or three warp groups of 64 query rows each keep their weights P in
registers and compute the softmax of one key block while the tensor cores multiply the next. Row i sees the keys from i + lower (LEFT) to i + upper (RIGHT), as far as those bounds are
there. Key blocks run from the last visible one down; those that a group sees whole are not masked.
Logits may be capped (CAPPED), and each head may have a sink: one more logit, of value 0 (SINKS).

Heads of keys may be wider than those of values: D columns and EXTRA more are multiplied in turn
(192 = 128 + 64: sizes of tiles are powers of two), and values and outputs have D columns.

Barriers: K and V have separate full (one arrival and bytes) and free (one arrival per group) rings
of STAGES blocks. The producer starts with phase 1, which a fresh barrier passes, the consumers with
0. A group that does not need a block still waits for it and frees it. Queries are freed after their
last product where the output has its own buffer (OWN_OUT), else with the output, which takes their
place.
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

from kernels.attention.hopper_common import barriers

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _hidden(x):
    """Return x as a value that the compiler cannot see through, nor keep the consequences of."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _own_count(lists, sizes, RIGHT: gl.constexpr, LEFT: gl.constexpr):
    """Return how many tiles this program computes."""
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    if RIGHT and not LEFT:
        return gl.load(lists + gl.program_id(0) + 1) - gl.load(lists + gl.program_id(0))
    return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _own_tile(
    i, lists, sizes, NC: gl.constexpr, BM: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr
):
    """Return batch, head and first row of this program's tile i."""
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    row_tiles = gl.cdiv(seq_q, NC * BM)
    if RIGHT and not LEFT:
        order = lists + gl.num_programs(0) + 1 + gl.load(lists + gl.program_id(0))
        tile = gl.load(order + i)
        head, place = tile // row_tiles, tile % row_tiles
    else:
        # Late rows first: the last tiles of all are a window's short ones.
        tile = gl.program_id(0) + i * gl.num_programs(0)
        head, place = tile // row_tiles, row_tiles - 1 - tile % row_tiles
    return head // heads, head % heads, place * (NC * BM)


@gluon.jit
def _seen_blocks(
    first_row, end_row, sizes, BN: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr
):
    """Return the first key block that rows see and the end of them: at least one, maybe unseen."""
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    end = seq_k
    if RIGHT:
        end = gl.minimum(seq_k, end_row + upper)
    end_block = gl.maximum(gl.cdiv(end, BN), 1)
    first_block = 0
    if LEFT:
        first_block = gl.minimum(gl.maximum(first_row + lower, 0) // BN, end_block - 1)
    return first_block, end_block


@gluon.jit
def _whole_blocks(
    row, first, end, sizes,
    BM: gl.constexpr, BN: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Return the run of the blocks first..end of which each of BM rows sees every key.

    Without `first` or `end` - 1 where those are not whole; empty (both alike) if there are none.
    """
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    stop = seq_k
    if RIGHT:
        stop = gl.minimum(seq_k, gl.maximum(row + upper + 1, 0))
    whole_end = gl.maximum(gl.minimum(stop // BN, end), first)
    whole_first = first
    if LEFT:
        start = gl.cdiv(gl.maximum(row + BM - 1 + lower, 0), BN)
        whole_first = gl.minimum(gl.maximum(start, first), whole_end)
    return whole_first, whole_end


@gluon.jit
def _produce(
    descriptors, lists, sizes, buffers, bars,
    NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, EXTRA: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Load Q once and K, V block by block."""
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    q_d, k_d, v_d, o_d, qx_d, kx_d = descriptors
    q_s, k_s, v_s, qx_s, kx_s, o_s = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    q_bytes: gl.constexpr = q_d.block_type.nbytes
    k_bytes: gl.constexpr = k_d.block_type.nbytes
    # Both are D + EXTRA columns wide, and D a power of two.
    q_all: gl.constexpr = q_bytes // D * (D + EXTRA)
    k_all: gl.constexpr = k_bytes // D * (D + EXTRA)
    before = 0
    for i in range(_own_count(lists, sizes, RIGHT, LEFT)):
        batch, head, tile_row = _own_tile(i, lists, sizes, NC, BM, RIGHT, LEFT)
        first, end = _seen_blocks(tile_row, tile_row + NC * BM, sizes, BN, RIGHT, LEFT)
        kv_head = head // group
        for j in range(before, before + end - first):
            slot = j % STAGES
            phase = (j // STAGES & 1) ^ 1
            key = (end - 1 - (j - before)) * BN
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_all)
            tma.async_copy_global_to_shared(
                k_d, [batch, kv_head, key, 0], k_full.index(slot), k_s.index(slot)
            )
            if EXTRA > 0:
                tma.async_copy_global_to_shared(
                    kx_d, [batch, kv_head, key, D], k_full.index(slot), kx_s.index(slot)
                )
            if j == before:
                for c in gl.static_range(NC):
                    row = tile_row + c * BM
                    mbarrier.wait(q_free.index(c), (i & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), q_all)
                    tma.async_copy_global_to_shared(
                        q_d, [batch, head, row, 0], q_full.index(c), q_s.index(c)
                    )
                    if EXTRA > 0:
                        tma.async_copy_global_to_shared(
                            qx_d, [batch, head, row, D], q_full.index(c), qx_s.index(c)
                        )
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_d.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_d, [batch, kv_head, key, 0], v_full.index(slot), v_s.index(slot)
            )
        before += end - first


@gluon.jit
def _pass_block(j, bars, STAGES: gl.constexpr):
    """Wait for a block that this group does not need, and free it."""
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    slot = j % STAGES
    phase = j // STAGES & 1
    mbarrier.wait(k_full.index(slot), phase)
    mbarrier.arrive(k_free.index(slot))
    mbarrier.wait(v_full.index(slot), phase)
    mbarrier.arrive(v_free.index(slot))


@gluon.jit
def _scores(
    j, buffers, bars, zero,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Wait for the keys of block j and start Q K^T."""
    q_s, k_s, v_s, qx_s, kx_s, o_s = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    slot = j % STAGES
    mbarrier.wait(k_full.index(slot), j // STAGES & 1)
    q = q_s.index(C).reshape([BM, D])
    keys = k_s.index(slot).reshape([BN, D]).permute((1, 0))
    s = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
    if EXTRA > 0:
        qx = qx_s.index(C).reshape([BM, EXTRA])
        keys_x = kx_s.index(slot).reshape([BN, EXTRA]).permute((1, 0))
        s = warpgroup_mma(qx, keys_x, s, is_async=True)
    return s


@gluon.jit
def _await_values(j, bars, STAGES: gl.constexpr):
    """Wait for the values of block j."""
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    mbarrier.wait(v_full.index(j % STAGES), j // STAGES & 1)


@gluon.jit
def _weigh(j, pb, acc, buffers, bars, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Start adding P V of block j, whose values are there but with 128 columns."""
    q_s, k_s, v_s, qx_s, kx_s, o_s = buffers
    if D == 128:
        _await_values(j, bars, STAGES)
    return warpgroup_mma(pb, v_s.index(j % STAGES).reshape([BN, D]), acc, is_async=True)


@gluon.jit
def _cap(s, factors, CAPPED: gl.constexpr):
    """With a softcap return tanh(scores * scale / softcap); what follows then scales by the softcap."""
    scale_log2, inner = factors
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); the hardware's own tanh errs by 2^-11.
        grown = gl.exp2(s * (2 * LOG2_E * inner)) + 1
        inverse = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
        s = 1 - 2 * inverse
    return s


@gluon.jit
def _mask(
    s, row, first_key, sizes,
    BM: gl.constexpr, BN: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Set the scores of invisible keys to -inf."""
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    rows = row + gl.arange(0, BM, gl.SliceLayout(1, s.type.layout))
    # Were the mask known to be the same in every block, it would be kept in registers, and spill.
    keys = _hidden(first_key) + gl.arange(0, BN, gl.SliceLayout(0, s.type.layout))
    end = rows * 0 + seq_k
    if RIGHT:
        end = gl.minimum(rows + upper + 1, seq_k)
    if LEFT:
        # One comparison for both ends: below the first key the unsigned distance is huge.
        low = rows + lower
        distance = (keys[None, :] - low[:, None]).to(gl.uint32)
        visible = distance < gl.maximum(end - low, 0).to(gl.uint32)[:, None]
    else:
        visible = keys[None, :] - end[:, None] < 0
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def _anchor(m):
    """Return what to subtract from a row's scores: its peak, or 0 where it has seen no key yet."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def _lane_sum(p, BM: gl.constexpr, BN: gl.constexpr):
    """Sum the columns that one thread holds; the four lanes of a row are added once, at the end."""
    return gl.sum(gl.sum(p.reshape([BM, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _attend_block(
    j, key, row, m, sums, acc, pb, factors, zero, sizes, buffers, bars,
    C: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    STAGES: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, CAPPED: gl.constexpr, is_masked,
):  # fmt: skip
    """Multiply block j's keys and block j - 1's values; return the state after block j's softmax."""
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    scale_log2, inner = factors
    s_t = _scores(j, buffers, bars, zero, C, BM, BN, D, EXTRA, STAGES)
    acc_t = _weigh(j - 1, pb, acc, buffers, bars, BN, D, STAGES)
    s = warpgroup_mma_wait(1, deps=(s_t,))
    mbarrier.arrive(k_free.index(j % STAGES))
    s = _cap(s, factors, CAPPED)
    # A branch at run time: a loop of its own for each run of blocks spills at head size 64.
    if is_masked:
        s = _mask(s, row, key, sizes, BM, BN, RIGHT, LEFT)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    alpha = gl.exp2(m - _anchor(m_new))
    p = gl.exp2(s * scale_log2 - _anchor(m_new)[:, None])
    lane_alpha = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))
    sums = sums * lane_alpha[:, None] + _lane_sum(p, BM, BN)
    if D != 128:
        # ptxas moves the softmax behind the wait below, but not across this one (hopper_forward.py).
        _await_values(j, bars, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc_t,))
    mbarrier.arrive(v_free.index((j - 1) % STAGES))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return m_new, sums, acc, gl.convert_layout(p.to(pb.dtype), pb.type.layout)


@gluon.jit
def _with_sink(sink_ptr, m, total, head, SINKS: gl.constexpr):
    """Add the head's sink, one more logit of value 0: peak and sum, and what the output is times."""
    kept = gl.where(total > 0, 1 / total, 0.0)
    if SINKS:
        sink = gl.load(sink_ptr + head).to(gl.float32) * LOG2_E
        peak = gl.maximum(m, sink)
        shrunk = gl.exp2(m - _anchor(peak))
        total = total * shrunk + gl.exp2(sink - _anchor(peak))
        kept = gl.where(total > 0, shrunk / total, 0.0)
        m = peak
    return m, total, kept


@gluon.jit
def _store(
    o_d, lse_ptr, sink_ptr, m, sums, acc, i, lists, sizes, o_s,
    C: gl.constexpr, NC: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, RIGHT: gl.constexpr,
    LEFT: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """Divide the output by the row sums and store it, with the logsumexp (-inf without a key)."""
    seq_q, seq_k, heads, group, upper, lower, tiles = sizes
    # Found again, not kept in registers.
    batch, head, tile_row = _own_tile(_hidden(i), lists, sizes, NC, BM, RIGHT, LEFT)
    row = tile_row + C * BM
    total = gl.convert_layout(gl.sum(sums, 1), m.type.layout)
    m, total, kept = _with_sink(sink_ptr, m, total, head, SINKS)
    acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, acc.type.layout))[:, None]
    tma.store_wait(0)
    o_s.reshape([BM, D]).store(acc.to(o_d.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_d, [batch, head, row, 0], o_s)
    rows = row + gl.arange(0, BM, m.type.layout)
    first = (batch.to(gl.int64) * heads + head) * seq_q
    gl.store(lse_ptr + first + rows, (m + gl.log2(total)) * LN_2, mask=rows < seq_q)


@gluon.jit
def _consume(
    descriptors, lse_ptr, sink_ptr, factors, lists, sizes, buffers, bars,
    C: gl.constexpr, NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    EXTRA: gl.constexpr, STAGES: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr,
    CAPPED: gl.constexpr, SINKS: gl.constexpr,
    OWN_OUT: gl.constexpr,
):  # fmt: skip
    """Attend the BM query rows of group C in each tile of this program."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    o_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    p_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_l, k_width=2)
    q_d, k_d, v_d, o_d, qx_d, kx_d = descriptors
    q_s, k_s, v_s, qx_s, kx_s, o_s = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    scale_log2, inner = factors
    zero = gl.zeros([BM, BN], gl.float32, s_l)
    before = 0
    for i in range(_own_count(lists, sizes, RIGHT, LEFT)):
        batch, head, tile_row = _own_tile(i, lists, sizes, NC, BM, RIGHT, LEFT)
        row = tile_row + C * BM
        tile_first, tile_end = _seen_blocks(tile_row, tile_row + NC * BM, sizes, BN, RIGHT, LEFT)
        first, end = _seen_blocks(row, row + BM, sizes, BN, RIGHT, LEFT)
        whole_first, whole_end = _whole_blocks(row, first, end, sizes, BM, BN, RIGHT, LEFT)
        # Blocks by their order since the program began: `before` is the tile's last, `start` this
        # group's own last, then come those masked at its upper end, the whole ones, those masked at
        # its lower end, and from `stop` on others'.
        last = before + tile_end - 1
        start = before + tile_end - end
        stop = before + tile_end - first
        whole_start = gl.maximum(before + tile_end - whole_end, start + 1)
        whole_stop = gl.maximum(before + tile_end - whole_first, whole_start)
        for j in range(before, start):
            _pass_block(j, bars, STAGES)
        mbarrier.wait(q_full.index(C), i & 1)
        s_t = _scores(start, buffers, bars, zero, C, BM, BN, D, EXTRA, STAGES)
        s = warpgroup_mma_wait(0, deps=(s_t,))
        mbarrier.arrive(k_free.index(start % STAGES))
        s = _cap(s, factors, CAPPED)
        s = _mask(s, row, (last - start) * BN, sizes, BM, BN, RIGHT, LEFT)
        m = gl.max(s, 1) * scale_log2
        p = gl.exp2(s * scale_log2 - _anchor(m)[:, None])
        sums = _lane_sum(p, BM, BN)
        pb = gl.convert_layout(p.to(o_d.dtype), p_l)
        acc = gl.zeros([BM, D], gl.float32, o_l)
        if D != 128:
            _await_values(start, bars, STAGES)
        for j in range(start + 1, stop):
            m, sums, acc, pb = _attend_block(
                j, (last - j) * BN, row, m, sums, acc, pb, factors, zero, sizes, buffers, bars,
                C, BM, BN, D, EXTRA, STAGES, RIGHT, LEFT, CAPPED,
                (j < whole_start) | (j >= whole_stop),
            )  # fmt: skip
        if OWN_OUT:
            mbarrier.arrive(q_free.index(C))
        acc_t = _weigh(stop - 1, pb, acc, buffers, bars, BN, D, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc_t,))
        mbarrier.arrive(v_free.index((stop - 1) % STAGES))
        before += tile_end - tile_first
        for j in range(stop, before):
            _pass_block(j, bars, STAGES)
        _store(
            o_d, lse_ptr, sink_ptr, m, sums, acc, i, lists, sizes,
            o_s.index(C) if OWN_OUT else q_s.index(C), C, NC, BM, D, RIGHT, LEFT, SINKS,
        )  # fmt: skip
        if not OWN_OUT:
            # The output has taken the queries' place.
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(C))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seq_q", "seq_k", "heads", "group", "upper", "lower", "tiles"])
def single_forward_kernel(
    q_d, k_d, v_d, o_d, qx_d, kx_d, lse_ptr, sink_ptr, lists, scale_log2, inner,
    seq_q, seq_k, heads, group, upper, lower, tiles,
    NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, EXTRA: gl.constexpr,
    STAGES: gl.constexpr, RIGHT: gl.constexpr, LEFT: gl.constexpr, CAPPED: gl.constexpr,
    SINKS: gl.constexpr, OWN_OUT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute out and lse: NC groups of BM query rows, BN keys per block.

    qx_d and kx_d describe q and k in tiles of EXTRA columns, sink_ptr holds a logit for each head,
    `lists` the tiles of each program; without EXTRA, SINKS, and RIGHT alone they are not read. With CAPPED, `inner` is scale / softcap and
    `scale_log2` softcap * log2(e), else the latter is scale * log2(e).
    """
    sizes = (seq_q, seq_k, heads, group, upper, lower, tiles)
    descriptors = (q_d, k_d, v_d, o_d, qx_d, kx_d)
    factors = (scale_log2, inner)
    dtype: gl.constexpr = q_d.dtype
    # Without EXTRA the smallest tile, which nothing touches.
    extra_rows: gl.constexpr = BM if EXTRA > 0 else 8
    extra_keys: gl.constexpr = BN if EXTRA > 0 else 8
    out_rows: gl.constexpr = BM if OWN_OUT else 8
    extra_columns: gl.constexpr = EXTRA if EXTRA > 0 else D
    buffers = (
        gl.allocate_shared_memory(dtype, [NC, 1, 1, BM, D], q_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], v_d.layout),
        gl.allocate_shared_memory(dtype, [NC, 1, 1, extra_rows, extra_columns], qx_d.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, extra_keys, extra_columns], kx_d.layout),
        gl.allocate_shared_memory(dtype, [NC, 1, 1, out_rows, D], o_d.layout),
    )
    bars = (
        barriers(NC, 1),
        barriers(NC, 1),
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
                    descriptors, lse_ptr, sink_ptr, factors, lists, sizes, buffers, bars,
                    0, NC, BM, BN, D, EXTRA, STAGES, RIGHT, LEFT, CAPPED, SINKS, OWN_OUT,
                )),
                (_consume, (
                    descriptors, lse_ptr, sink_ptr, factors, lists, sizes, buffers, bars,
                    1, NC, BM, BN, D, EXTRA, STAGES, RIGHT, LEFT, CAPPED, SINKS, OWN_OUT,
                )),
                (_produce, (
                    descriptors, lists, sizes, buffers, bars, NC, BM, BN, EXTRA, D, STAGES, RIGHT, LEFT,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    descriptors, lse_ptr, sink_ptr, factors, lists, sizes, buffers, bars,
                    0, NC, BM, BN, D, EXTRA, STAGES, RIGHT, LEFT, CAPPED, SINKS, OWN_OUT,
                )),
                (_consume, (
                    descriptors, lse_ptr, sink_ptr, factors, lists, sizes, buffers, bars,
                    1, NC, BM, BN, D, EXTRA, STAGES, RIGHT, LEFT, CAPPED, SINKS, OWN_OUT,
                )),
                (_consume, (
                    descriptors, lse_ptr, sink_ptr, factors, lists, sizes, buffers, bars,
                    2, NC, BM, BN, D, EXTRA, STAGES, RIGHT, LEFT, CAPPED, SINKS, OWN_OUT,
                )),
                (_produce, (
                    descriptors, lists, sizes, buffers, bars, NC, BM, BN, EXTRA, D, STAGES, RIGHT, LEFT,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
