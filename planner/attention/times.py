"""How long an attention call takes: each kernel at the rate that was measured for its kind.

Rates are those of a training step (planner/speed): measured on this GPU, else on an H200, else what an
H200 reaches of its sheet. Linear attention was timed by its benchmark alone (`_LINEAR_SHARES`).
"""

from __future__ import annotations

import numpy as np

from planner.attention.backends import BACKWARD, FORWARD, our_backend
from planner.attention.costs import (
    BACKWARD_FLOPS,
    Work,
    eager_work,
    forward_flops,
    stores_scores,
    time_s,
    work,
)
from planner.attention.memory import FP32_BYTES
from planner.attention.problem import AttentionProblem, Numbers, Variant
from planner.hardware import Gpu
from planner.speed.calibrated import rates_of
from planner.speed.rates import FP32_ATTENTION, Rates, layout_number
from planner.speed.stream_kinds import stream_number

# Layouts of the products in eager's chain: scores and what is like them first, [S, D] x [D, S].
_PRODUCTS = {
    "Q K^T": ("nt",),
    "P V": ("nn",),
    "dP and dV": ("nt", "tn"),
    "dQ and dK": ("nn", "tn"),
}
# Its other kernels by the kind of stream they are, and the type it was measured in.
_STREAMS = {
    "keys and values repeated": ("repeat", "bf16"),
    "scale": ("unary", "bf16"),
    "mask": ("binary", "bf16"),
    "scores to fp32": ("cast_up", "bf16"),
    "softmax": ("softmax", "fp32"),
    "softmax backward": ("softmax_backward", "fp32"),
    "weights to 16 bits": ("cast_down", "fp32"),
    "heads summed": ("column_sum", "bf16"),
}
# Bytes that a point of the calibration counts, where the kernel in the chain moves others: torch
# multiplies gradient and output in a kernel before the softmax's own backward.
_COUNTED_SHARES = {"softmax backward": 0.5}
# What products outside the tensor cores reach of fp32's rate in a fused kernel that was not measured.
_FP32_SHARE = 0.5
# What linear attention reached of its roofline on an H200, forward and backward: the rows of 8,192 and
# 32,768 tokens in recorded/kernels/h200-linear-attention.jsonl.
_LINEAR_SHARES = {FORWARD: 0.30, BACKWARD: 0.37}


def expected_s(
    problem: AttentionProblem, variant: Variant, gpu: Gpu, direction: str, s: Numbers
) -> Numbers:
    """Return the time of one direction at sequence lengths `s`, its kernels one after the other."""
    rates = rates_of(gpu)
    if variant is Variant.LINEAR:
        return time_s(work(problem, variant, gpu, direction, s), gpu) / _LINEAR_SHARES[direction]
    if stores_scores(problem, variant, gpu):
        total: Numbers = 0.0
        for part in eager_work(problem, s, direction):
            total = total + _eager_part_s(part, problem, rates, s)
        return total
    return _fused_s(problem, variant, gpu, direction, s) + rates.gap_s


def _fused_s(
    problem: AttentionProblem, variant: Variant, gpu: Gpu, direction: str, s: Numbers
) -> Numbers:
    """One kernel, or a backward's several, whose rate was measured over the pairs that are seen."""
    rates = rates_of(gpu)
    flops = forward_flops(problem, variant, s) * (1.0 if direction == FORWARD else BACKWARD_FLOPS)
    is_sdpa = variant is Variant.SDPA
    backend = "sdpa" if is_sdpa else our_backend(problem, variant, gpu, direction)
    kind = f"attention_{direction}_{backend}"
    if problem.dtype == "fp32":
        kind += FP32_ATTENTION
        if kind not in rates.attention:
            slowest: Numbers = flops / (_FP32_SHARE * rates.peak_flop_s["fp32"])
            return slowest
    elif kind not in rates.attention:
        kind = f"attention_{direction}_triton"
    rows = problem.batch * problem.heads
    taken_s: Numbers = rates.attention_s(kind, rows, s, problem.head_dim, flops)
    return taken_s


def _eager_part_s(part: Work, problem: AttentionProblem, rates: Rates, s: Numbers) -> Numbers:
    if part.name in _PRODUCTS:
        return sum((_product_s(x, problem, rates, s) for x in _PRODUCTS[part.name]), start=0.0)
    kind, dtype = _STREAMS[part.name]
    if problem.element_bytes == FP32_BYTES:
        dtype = "fp32"
    moved = part.bytes * _COUNTED_SHARES.get(part.name, 1.0)
    taken_s: Numbers = rates.stream_s(stream_number(kind, dtype), moved) + rates.gap_s
    return taken_s


def _product_s(layout: str, problem: AttentionProblem, rates: Rates, s: Numbers) -> Numbers:
    """[S, D] x [D, S] (nt), or [S, S] x [S, D], for every sequence and head."""
    length = np.asarray(s, dtype=np.float64)
    head_dim = np.full_like(length, problem.head_dim)
    sizes = (length, length, head_dim) if layout == "nt" else (length, head_dim, length)
    dtype = "fp32" if problem.dtype == "fp32" else "bf16"
    batch = float(problem.batch * problem.heads)
    taken_s: Numbers = rates.product_s("bmm", dtype, layout_number(layout), batch, sizes)
    return taken_s + rates.gap_s
