"""FLOPs and HBM bytes of each variant, kernel by kernel, and the roofline time of both.

A tensor counts once for each kernel that reads or writes it. Exact kernels move Q, K, V and O once a
pass instead of the N x N scores (Dao et al., FlashAttention, arXiv 2205.14135, theorem 2: what tiles
read again comes from the L2 cache where keys and values of the heads at work fit it), and their
backward computes five products where the forward computes two (FlashAttention-2, arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.attention.backends import BACKWARD, our_backend, sdpa_backend
from planner.attention.memory import FP32_BYTES, Sizes, linear_tile
from planner.attention.problem import AttentionProblem, Numbers, Variant, visible_pairs
from planner.errors import PlanError
from planner.hardware import Gpu

# Two products forward; in the backward the scores again, and four of gradients.
_FORWARD_PRODUCTS, _FUSED_BACKWARD_PRODUCTS = 2, 5
BACKWARD_FLOPS = _FUSED_BACKWARD_PRODUCTS / _FORWARD_PRODUCTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel, or several alike: FLOPs of products, bytes read and written in HBM."""

    name: str
    flops: Numbers
    bytes: Numbers
    rate: str

    def flop_s(self, gpu: Gpu) -> float:
        """Return the vendor's rate of `gpu` for these products."""
        return rate_flop_s(gpu, self.rate)

    def roofline_s(self, gpu: Gpu) -> Numbers:
        """Return max(FLOPs / rate, bytes / bandwidth) at the vendor's rates."""
        longer: Numbers = np.maximum(
            self.flops / self.flop_s(gpu), self.bytes / gpu.mem_bandwidth_bytes_s
        )
        return longer


def work(
    problem: AttentionProblem, variant: Variant, gpu: Gpu, direction: str, s: Numbers
) -> tuple[Work, ...]:
    """Return what a variant does in one direction at sequence lengths `s`."""
    is_backward = direction == BACKWARD
    if variant is Variant.LINEAR:
        return _linear(problem, Sizes.of(problem, s), is_backward)
    if stores_scores(problem, variant, gpu):
        return eager_work(problem, s, direction)
    return _fused(problem, variant, gpu, Sizes.of(problem, s), is_backward)


def forward_flops(problem: AttentionProblem, variant: Variant, s: Numbers) -> Numbers:
    """Return the FLOPs of the forward's two products over the pairs that a variant sees."""
    pairs = visible_pairs(problem, variant, s)
    return _FORWARD_PRODUCTS * 2.0 * problem.batch * problem.heads * problem.head_dim * pairs


def stores_scores(problem: AttentionProblem, variant: Variant, gpu: Gpu) -> bool:
    """Whether a variant runs as a chain of kernels with the scores between them."""
    if variant is Variant.SDPA:
        return sdpa_backend(problem, gpu) == "math"
    return variant is Variant.EAGER


def flops(parts: tuple[Work, ...]) -> Numbers:
    """Return the FLOPs of all kernels."""
    return sum((part.flops for part in parts), start=0.0)


def moved_bytes(parts: tuple[Work, ...]) -> Numbers:
    """Return the HBM bytes of all kernels."""
    return sum((part.bytes for part in parts), start=0.0)


def rate_flop_s(gpu: Gpu, rate: str) -> float:
    """Return the GPU's peak for an element type, fp32's where it lacks it.

    Raises PlanError where neither is known.
    """
    found = gpu.peak_dense_flop_s.get(rate) or gpu.peak_dense_flop_s.get("fp32")
    if found is None:
        field = f"hardware.custom.peak_dense_flop_s.{rate}"
        sentence = f"{field} is missing: this attention computes in {rate}."
        raise PlanError(field, None, "a rate", sentence=sentence)
    return found


def time_s(parts: tuple[Work, ...], gpu: Gpu) -> Numbers:
    """Return the sum of the kernels' rooflines at the vendor's rates: a bound from below."""
    total: Numbers = 0.0
    for part in parts:
        total = total + part.roofline_s(gpu)
    return total


def _fused(
    problem: AttentionProblem, variant: Variant, gpu: Gpu, sizes: Sizes, is_backward: bool
) -> tuple[Work, ...]:
    """A kernel that visits the tiles with a visible pair; the backward is preceded by row sums."""
    pairs = visible_pairs(problem, variant, sizes.s)
    product = 2.0 * problem.batch * problem.heads * problem.head_dim * pairs
    if not is_backward:
        moved = 2 * sizes.query + 2 * sizes.key + sizes.rows
        return (_named("the kernel", product * _FORWARD_PRODUCTS, moved, problem.dtype),)
    row_sums = _named("row sums", 0.0, 2 * sizes.query + sizes.rows, problem.dtype)
    gradient_flops = product * _FUSED_BACKWARD_PRODUCTS
    inputs = 2 * sizes.query + 2 * sizes.key + 2 * sizes.rows
    is_ours = variant is not Variant.SDPA
    if is_ours and our_backend(problem, variant, gpu, BACKWARD) == "triton":
        # Two kernels, dK and dV, then dQ: each computes the weights and their gradient itself.
        moved = 2 * inputs + sizes.query + 2 * sizes.key
        again = product * _FORWARD_PRODUCTS
        return row_sums, _named(
            "two gradient kernels", gradient_flops + again, moved, problem.dtype
        )
    # dQ is set to zero, added up (read and written) and read in fp32, and written.
    summed = sizes.query * (4 * FP32_BYTES / sizes.element)
    moved = inputs + summed + sizes.query + 2 * sizes.key
    return row_sums, _named("gradient kernel", gradient_flops, moved, problem.dtype)


def _named(name: str, flops: Numbers, moved: Numbers, rate: str) -> Work:
    return Work(name=name, flops=flops, bytes=moved, rate=rate)


def eager_work(problem: AttentionProblem, s: Numbers, direction: str) -> tuple[Work, ...]:
    """Return eager's chain: products over the whole square, and passes over its scores."""
    sizes, dtype = Sizes.of(problem, s), problem.dtype
    n, e = sizes.scores, sizes.element
    product = 2.0 * problem.head_dim * n
    # The weights of bf16 and fp16 are cast back. A softmax from fp16 to fp32 is one kernel, from bf16 two.
    cast = () if dtype == "fp32" else (_named("weights to 16 bits", 0.0, n * (4 + e), dtype),)
    raised = (_named("scores to fp32", 0.0, n * (e + 4), dtype),)
    if direction != BACKWARD:
        masked = (_named("mask", 0.0, 3 * n * e, dtype),) if problem.causal else ()
        return (
            _named("keys and values repeated", 0.0, 2 * (sizes.key + sizes.query), dtype),
            _named("Q K^T", product, 2 * sizes.query + n * e, dtype),
            _named("scale", 0.0, 2 * n * e, dtype),
            *masked,
            *(raised if dtype == "bf16" else ()),
            _named("softmax", 0.0, n * (e + 4 if dtype == "fp16" else 8), dtype),
            *cast,
            _named("P V", product, n * e + 2 * sizes.query, dtype),
        )
    return (
        _named("dP and dV", 2 * product, 2 * n * e + 4 * sizes.query, dtype),
        *(raised if dtype != "fp32" else ()),
        _named("softmax backward", 0.0, n * (20 + e if dtype == "fp16" else 24), dtype),
        *(cast if dtype == "bf16" else ()),
        _named("scale", 0.0, 2 * n * e, dtype),
        _named("dQ and dK", 2 * product, 2 * n * e + 4 * sizes.query, dtype),
        _named("heads summed", 0.0, 2 * (sizes.query + sizes.key), dtype),
    )


def _linear(problem: AttentionProblem, sizes: Sizes, is_backward: bool) -> tuple[Work, ...]:
    """States of all chunks, then each chunk by itself (kernels/linear_attention/device.py), in tf32.

    A chunk of C tokens: its state takes 2 C D^2, its output 2 C D^2 from the state and 4 C^2 D within.
    """
    columns, chunk = linear_tile(problem.head_dim)
    rate = "fp32" if problem.dtype == "fp32" else "tf32"
    chunks = np.ceil(sizes.s / chunk)
    states = chunks * float(FP32_BYTES * problem.batch * problem.kv_heads * columns * (columns + 1))
    tokens = float(problem.batch) * sizes.s
    square, within = 2.0 * problem.head_dim**2 * tokens, 4.0 * chunk * problem.head_dim * tokens
    group = problem.heads // problem.kv_heads
    heads, kv_heads = problem.heads, problem.kv_heads
    before = _named("states before chunks", square * kv_heads, 2 * sizes.key + states, rate)
    if not is_backward:
        moved = 2 * sizes.query + 2 * sizes.key + group * states + sizes.rows
        return before, _named("output", (square + within) * heads, moved, rate)
    upper = 3 * sizes.query + sizes.rows
    return (
        before,
        _named("dQ", (square + within) * heads, upper + 2 * sizes.key + group * states, rate),
        _named("states behind chunks", square * heads, upper + states, rate),
        _named(
            "dK and dV",
            2 * (square * kv_heads + within * heads),
            2 * (upper + 2 * sizes.key + states) + 2 * sizes.key,
            rate,
        ),
    )
