"""Triton device code of chunked causal linear attention.

f = elu + 1. A chunk sees what came before it through one state, S = sum f(k) v^T and z = sum f(k), and
itself through a small triangle of weights. Backward, with g = dOut / d and e = -g . out (d is the sum
of a row's weights), the sums run from the end: R = sum f(q) g^T and r = sum f(q) e.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, first, seq, row_stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
          CHUNK: tl.constexpr):  # fmt: skip
    """Load a chunk's rows in fp32, zero outside; also return which elements exist."""
    return _columns(base, first, seq, row_stride, 0, HEAD_DIM, BLOCK_D, CHUNK)


@triton.jit
def _columns(base, first, seq, row_stride, first_column, HEAD_DIM: tl.constexpr,
             COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """As `_tile`, of COLUMNS columns from `first_column` on."""
    rows, columns = first + tl.arange(0, CHUNK), first_column + tl.arange(0, COLUMNS)
    inside = (rows < seq)[:, None] & (columns < HEAD_DIM)[None, :]
    places = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(base + places, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _features(values, inside):
    """elu + 1, and zero for what does not exist (f(0) is 1)."""
    bounded = tl.exp(tl.minimum(values, 0.0))
    return tl.where(inside, tl.where(values > 0, values + 1.0, bounded), 0.0)


@triton.jit
def _slope(values):
    """The derivative of elu + 1."""
    return tl.where(values > 0, 1.0, tl.exp(tl.minimum(values, 0.0)))


@triton.jit
def _gradient_rows(dout, out, inverses, first, seq, dout_stride, out_stride,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                   CHUNK: tl.constexpr):  # fmt: skip
    """g = dOut / d and e = -g . out of a chunk's rows."""
    rows = first + tl.arange(0, CHUNK)
    inverse = tl.load(inverses + rows, mask=rows < seq, other=0.0)
    upper, _ = _tile(dout, first, seq, dout_stride, HEAD_DIM, BLOCK_D, CHUNK)
    g = upper * inverse[:, None]
    result, _ = _tile(out, first, seq, out_stride, HEAD_DIM, BLOCK_D, CHUNK)
    return g, -tl.sum(g * result, axis=1)


@triton.jit
def _head(base, strides, batch, head):
    return base + batch * strides[0] + head * strides[1]


@triton.jit
def _state_places(BLOCK_D: tl.constexpr):
    lines = tl.arange(0, BLOCK_D)
    return lines[:, None] * BLOCK_D + lines[None, :]


@triton.jit
def state_kernel(
    a, b, out, inverses, states, norms, a_strides, b_strides, out_strides,
    kv_heads, group, seq, chunks, BACKWARD: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store, for each chunk of one key-value head, ROWS rows of the sums over the chunks before it.

    Forward a, b are k, v (group 1) and the sums S, z. BACKWARD they are q, dOut, the group's heads
    are summed, the order is from the end, and the sums R, r are over the chunks behind it. Programs
    walk in order, so heads alone would leave most of a chip idle: rows of a state share nothing.
    """
    program, first_row = tl.program_id(0), tl.program_id(1) * ROWS
    batch, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    lines, columns = first_row + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    state = tl.zeros((ROWS, BLOCK_D), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    for step in tl.range(chunks * group, num_stages=STAGES):
        number = chunks - 1 - step // group if BACKWARD else step // group
        is_first = step % group == 0
        place = (program.to(tl.int64) * chunks + number) * BLOCK_D
        rows = (place + lines[:, None]) * BLOCK_D + columns[None, :]
        tl.store(states + rows, state, mask=is_first)
        tl.store(norms + place + lines, norm, mask=is_first)
        own = head * group + step % group
        raw, inside = _columns(_head(a, a_strides, batch, own), number * CHUNK, seq, a_strides[2],
                               first_row, HEAD_DIM, ROWS, CHUNK)  # fmt: skip
        features = _features(raw, inside)
        if BACKWARD:
            row = (batch * kv_heads * group + own) * seq
            values, extra = _gradient_rows(
                _head(b, b_strides, batch, own), _head(out, out_strides, batch, own),
                inverses + row, number * CHUNK, seq, b_strides[2], out_strides[2],
                HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
            norm += tl.sum(features * extra[:, None], axis=0)
        else:
            values, _ = _tile(_head(b, b_strides, batch, own), number * CHUNK, seq,
                              b_strides[2], HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
            norm += tl.sum(features, axis=0)
        state = tl.dot(tl.trans(features), values, state, input_precision=PRECISION)


@triton.jit
def output_kernel(
    q, k, v, out, inverses, states, norms, q_strides, k_strides, v_strides, out_strides,
    heads, group, seq, chunks, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of one query head: the output and 1 / the sum of each row's weights."""
    number, program = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    batch, head = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    first, shared = number * CHUNK, head // group
    raw, inside = _tile(_head(q, q_strides, batch, head), first, seq, q_strides[2],
                        HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    queries = _features(raw, inside)
    raw, in_keys = _tile(_head(k, k_strides, batch, shared), first, seq, k_strides[2],
                         HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    keys = _features(raw, in_keys)
    values, _ = _tile(_head(v, v_strides, batch, shared), first, seq, v_strides[2],
                      HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    weights = tl.where(rows[:, None] >= rows[None, :], weights, 0.0)
    place = (batch * (heads // group) + shared) * chunks + number
    state = tl.load(states + place * BLOCK_D * BLOCK_D + _state_places(BLOCK_D))
    norm = tl.load(norms + place * BLOCK_D + columns)
    sums = tl.dot(queries, state, input_precision=PRECISION)
    sums = tl.dot(weights, values, sums, input_precision=PRECISION)
    total = tl.sum(queries * norm[None, :], axis=1) + tl.sum(weights, axis=1)
    # Weights are above 0 unless every feature underflows: such a row is 0.
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(
        inverses + (batch * heads + head) * seq + first + rows, inverse, mask=first + rows < seq
    )
    places = (first + rows).to(tl.int64)[:, None] * out_strides[2] + columns[None, :]
    result = (sums * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(_head(out, out_strides, batch, head) + places, result, mask=inside)


@triton.jit
def query_gradient_kernel(
    q, k, v, out, dout, inverses, states, norms, dq,
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides,
    heads, group, seq, chunks, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of one query head: dQ = (S g + z e + within the chunk (g . v + e) f(k)) f'(q)."""
    number, program = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    batch, head = (program // heads).to(tl.int64), (program % heads).to(tl.int64)
    first, shared = number * CHUNK, head // group
    g, extra = _gradient_rows(
        _head(dout, dout_strides, batch, head), _head(out, out_strides, batch, head),
        inverses + (batch * heads + head) * seq, first, seq, dout_strides[2], out_strides[2],
        HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    values, _ = _tile(_head(v, v_strides, batch, shared), first, seq, v_strides[2],
                      HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    weights = tl.dot(g, tl.trans(values), input_precision=PRECISION) + extra[:, None]
    weights = tl.where(rows[:, None] >= rows[None, :], weights, 0.0)
    place = (batch * (heads // group) + shared) * chunks + number
    state = tl.load(states + place * BLOCK_D * BLOCK_D + _state_places(BLOCK_D))
    norm = tl.load(norms + place * BLOCK_D + columns)
    result = tl.dot(g, tl.trans(state), input_precision=PRECISION) + extra[:, None] * norm[None, :]
    raw, in_keys = _tile(_head(k, k_strides, batch, shared), first, seq, k_strides[2],
                         HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    result = tl.dot(weights, _features(raw, in_keys), result, input_precision=PRECISION)
    raw, inside = _tile(_head(q, q_strides, batch, head), first, seq, q_strides[2],
                        HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    places = (first + rows).to(tl.int64)[:, None] * dq_strides[2] + columns[None, :]
    result = (result * _slope(raw)).to(dq.dtype.element_ty)
    tl.store(_head(dq, dq_strides, batch, head) + places, result, mask=inside)


@triton.jit
def key_gradient_kernel(
    q, k, v, out, dout, inverses, states, norms, grad,
    q_strides, k_strides, v_strides, out_strides, dout_strides, grad_strides,
    kv_heads, group, seq, chunks, FOR_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of one key-value head, over its group: dK, or FOR_VALUES dV (both would spill).

    dV = R^T f(k) + within the chunk, from i on, (f(q_i) . f(k)) g_i; dK = (R v + r + the same with
    (g_i . v + e_i) f(q_i)) f'(k).
    """
    number, program = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    batch, head = (program // kv_heads).to(tl.int64), (program % kv_heads).to(tl.int64)
    first = number * CHUNK
    raw, inside = _tile(_head(k, k_strides, batch, head), first, seq, k_strides[2],
                        HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    place = program.to(tl.int64) * chunks + number
    state = tl.load(states + place * BLOCK_D * BLOCK_D + _state_places(BLOCK_D))
    if FOR_VALUES:
        own = _features(raw, inside)
        sums = tl.dot(own, state, input_precision=PRECISION)
    else:
        own, _ = _tile(_head(v, v_strides, batch, head), first, seq, v_strides[2],
                       HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
        norm = tl.load(norms + place * BLOCK_D + columns)
        sums = tl.dot(own, tl.trans(state), input_precision=PRECISION) + norm[None, :]
    for member in range(group):
        sharing = head * group + member
        g, extra = _gradient_rows(
            _head(dout, dout_strides, batch, sharing), _head(out, out_strides, batch, sharing),
            inverses + (batch * kv_heads * group + sharing) * seq, first, seq, dout_strides[2],
            out_strides[2], HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
        turned, in_queries = _tile(_head(q, q_strides, batch, sharing), first, seq, q_strides[2],
                                   HEAD_DIM, BLOCK_D, CHUNK)  # fmt: skip
        queries = _features(turned, in_queries)
        if FOR_VALUES:
            weights, summed = tl.dot(own, tl.trans(queries), input_precision=PRECISION), g
        else:
            weights = tl.dot(own, tl.trans(g), input_precision=PRECISION) + extra[None, :]
            summed = queries
        weights = tl.where(rows[None, :] >= rows[:, None], weights, 0.0)
        sums = tl.dot(weights, summed, sums, input_precision=PRECISION)
    if not FOR_VALUES:
        sums *= _slope(raw)
    places = (first + rows).to(tl.int64)[:, None] * grad_strides[2] + columns[None, :]
    result = sums.to(grad.dtype.element_ty)
    tl.store(_head(grad, grad_strides, batch, head) + places, result, mask=inside)
