"""Claims about one attention call: its score matrix, memory, traffic, FLOPs and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.attention.measured import Seen
from planner.attention.memory import FP32_BYTES, Sizes
from planner.attention.problem import AttentionProblem, Variant
from planner.claims.cases import (
    A100_80,
    LLAMA_8B,
    attention_of,
    llama_8b,
    training_plan,
    variant_of,
)
from planner.claims.claim import Bounds, Figure, Findings, Measured, Unit
from planner.claims.evidence import Evidence, of_calls
from planner.claims.figures import (
    PAIR,
    call_bytes,
    call_flops,
    call_s,
    call_traffic_bytes,
    findings,
    measured_pair,
    measured_steps,
    opens_call,
    plan_call,
    saved_by_call,
    saved_by_step,
    seen_bytes,
    seen_s,
    seen_saving,
)
from planner.hardware import resolve_gpu
from planner.plan import Plan
from planner.units import MIB_BYTES, format_bytes, format_seconds

TOKENS = 8192
LAYERS = 65
BLOCK = 128
SCORE_MATRIX_BYTES = 256 * MIB_BYTES
# A claim of "about 15 %" is given two points to either side, "98 %" half a point.
ABOUT_15 = Bounds(unit=Unit.SHARE, low=0.13, high=0.17)
AT_LEAST_98 = Bounds(unit=Unit.SHARE, low=0.975)
ABOUT_10 = Bounds(unit=Unit.TIMES, low=8.0, high=12.0)
# A fixed power of two is allowed a twentieth: the scalars of a call do not double.
DOUBLED = Bounds(unit=Unit.TIMES, low=1.9, high=2.1)
QUADRUPLED = Bounds(unit=Unit.TIMES, low=3.8, high=4.2)
SHAPE = "32/8 heads of 128, bf16, causal"


def call_at(tokens: int, **changes: Any) -> AttentionProblem:
    """Return one layer's attention of Llama-3.1-8B at a length, with changes."""
    return attention_of(llama_8b(tokens), **changes)


def _score_bytes(problem: AttentionProblem, element_bytes: int) -> float:
    scores = Sizes.of(problem, float(problem.sequence_length)).scores
    return float(scores) * element_bytes


def score_matrix(own: Plan | None, seen: Evidence) -> Findings:
    """8K x 8K scores of 4 bytes are 256 MB (MiB)."""
    plan, all_heads = llama_8b(TOKENS), call_at(TOKENS)
    one = call_at(TOKENS, heads=1, kv_heads=1)
    kept = variant_of(plan, all_heads, Variant.EAGER).saved_bytes
    figures = (
        _scores("1 head, fp32", plan, one, FP32_BYTES),
        _scores("1 head, bf16", plan, one, one.element_bytes),
        _scores("32 heads, fp32", plan, all_heads, FP32_BYTES),
        Figure(
            condition=f"what eager keeps for the backward: {SHAPE}",
            value=kept,
            how="weights in fp32 and bf16 of every head, keys and values of each head, mask, output",
            opens=opens_call(plan, all_heads),
        ),
    )
    return findings(
        Bounds(unit=Unit.BYTES, low=SCORE_MATRIX_BYTES, high=SCORE_MATRIX_BYTES),
        "One head of one sequence, 4 bytes a score; MB here means MiB.",
        f"one head is counted. A layer of 32 heads has 32 of them, and its backward finds "
        f"{format_bytes(kept)} that eager attention kept",
        figures,
        _kept_by_eager(seen, all_heads, 1),
        (own, _own_scores),
    )


def _scores(condition: str, plan: Plan, problem: AttentionProblem, element_bytes: int) -> Figure:
    value = _score_bytes(problem, element_bytes)
    s, heads = problem.sequence_length, problem.heads
    return Figure(
        condition=condition,
        value=value,
        how=f"{heads} x {s:,} x {s:,} x {element_bytes} B",
        opens=opens_call(plan, problem),
    )


def _own_scores(plan: Plan) -> Figure:
    problem = plan_call(plan)
    return _scores("", plan, replace(problem, batch=1), problem.element_bytes)


def _kept_by_eager(seen: Evidence, problem: AttentionProblem, layers: int) -> list[Measured]:
    one = seen.call(problem, Variant.EAGER)
    if one is None or one.saved_requested_bytes is None:
        return []
    times = "" if layers == 1 else f", one layer measured, times {layers}"
    condition = f"what eager kept: {SHAPE}{times}"
    return [of_calls(condition, layers * one.saved_requested_bytes, (one,))]


def layers(own: Plan | None, seen: Evidence) -> Findings:
    """65 layers' matrices exhaust the memory of a card."""
    capacity_bytes = resolve_gpu(A100_80).visible_bytes
    plan, problem = llama_8b(TOKENS), call_at(TOKENS)
    one_head = LAYERS * _score_bytes(call_at(TOKENS, heads=1, kv_heads=1), FP32_BYTES)
    eager, fused = (LAYERS * variant_of(plan, problem, kind).saved_bytes for kind in PAIR)
    figures = (
        Figure(
            condition="65 layers of 1 head, fp32",
            value=one_head,
            how=f"65 x {format_bytes(SCORE_MATRIX_BYTES)}",
        ),
        Figure(
            condition=f"65 layers as eager keeps them: {SHAPE}",
            value=eager,
            how="65 times what one layer keeps",
            opens=opens_call(plan, problem),
        ),
    )
    return findings(
        Bounds(unit=Unit.BYTES, low=capacity_bytes),
        "Every layer keeps its matrices for the backward (no checkpointing), with all its heads.",
        f"all heads are counted: with one head they fit an 80 GB card. A fused kernel keeps "
        f"{format_bytes(fused)} in 65 layers",
        figures,
        _kept_by_eager(seen, problem, LAYERS),
    )


def memory_98(own: Plan | None, seen: Evidence) -> Findings:
    """A block of 128 tokens at a time takes 98 % less memory."""
    long, short = llama_8b(TOKENS), llama_8b(2048)
    figures = (
        Figure(
            condition="scores of 128 rows instead of 8,192",
            value=1 - BLOCK / TOKENS,
            how=f"1 - {BLOCK} / {TOKENS:,}",
        ),
        saved_by_call(long, call_at(TOKENS), f"one call, 8,192 tokens: {SHAPE}"),
        saved_by_call(short, call_at(2048), f"one call, 2,048 tokens: {SHAPE}"),
        saved_by_step(long, "whole step of Llama-3.1-8B, 8,192 tokens"),
        saved_by_step(llama_8b(TOKENS, "full"), "the same step, checkpointing full"),
    )
    return findings(
        AT_LEAST_98,
        "About 8K tokens or more, and only what attention holds beside its inputs counts.",
        "the call alone is counted at about 8K tokens: a whole step has weights, states and other "
        "activations too. What the kernel keeps in HBM does not depend on its block",
        figures,
        [
            *measured_pair(seen, call_at(TOKENS), f"one call, 8,192 tokens: {SHAPE}", seen_saving),
            *measured_pair(seen, call_at(4096), f"one call, 4,096 tokens: {SHAPE}", seen_saving),
            *measured_steps(
                seen,
                llama_8b(TOKENS, "full"),
                "step of Llama-3.1-8B, 8,192 tokens, checkpointing full",
                lambda ratio: 1 - 1 / ratio,
                "allocated_bytes",
            ),
        ],
        (own, lambda plan: saved_by_step(plan, "")),
    )


def linear_memory(own: Plan | None, seen: Evidence) -> Findings:
    """Twice the sequence takes twice the memory of a fused call."""
    plan, half, whole = llama_8b(TOKENS), call_at(4096), call_at(TOKENS)
    fused, ours, eager = (
        call_bytes(plan, whole, kind) / call_bytes(plan, half, kind)
        for kind in (Variant.SDPA, Variant.TRITON, Variant.EAGER)
    )
    how = "peak of the call at 8,192 over that at 4,096 tokens"
    figures = (
        Figure(condition="sdpa", value=fused, how=how, opens=opens_call(plan, whole)),
        Figure(
            condition="our kernel",
            value=ours,
            how=how,
            opens=opens_call(plan, whole, (Variant.TRITON,)),
        ),
    )
    return findings(
        DOUBLED,
        "An exact fused kernel; the number is memory at 8,192 over memory at 4,096 tokens.",
        f"the scores are never stored. Eager takes {eager:.2f} times as much for twice the tokens",
        figures,
        _doubling(seen, half, whole, seen_bytes, "sdpa, peak of the call", 1),
    )


def quadratic_flops(own: Plan | None, seen: Evidence) -> Findings:
    """Twice the sequence takes four times the FLOPs, with FlashAttention too."""
    plan = llama_8b(TOKENS)
    figures = [
        Figure(
            condition=f"sdpa, {mask} mask",
            value=call_flops(plan, call_at(TOKENS, causal=causal), Variant.SDPA)
            / call_flops(plan, call_at(4096, causal=causal), Variant.SDPA),
            how="FLOPs of forward and backward at 8,192 over those at 4,096 tokens",
            opens=opens_call(plan, call_at(TOKENS, causal=causal)),
        )
        for mask, causal in (("full", False), ("causal", True))
    ]
    return findings(
        QUADRUPLED,
        "Dense attention, whichever kernel computes it.",
        "a kernel changes where the scores are kept, not how many products there are",
        figures,
        _doubling(seen, call_at(TOKENS), call_at(4 * TOKENS), seen_s, "sdpa, time", 2),
    )


def _doubling(
    seen: Evidence,
    short: AttentionProblem,
    long: AttentionProblem,
    quantity: Callable[[Seen], float | None],
    name: str,
    doublings: int,
) -> list[Measured]:
    """Return the growth per doubling that runs at two lengths show."""
    one, other = seen.call(short, Variant.SDPA), seen.call(long, Variant.SDPA)
    if one is None or other is None:
        return []
    first, last = quantity(one), quantity(other)
    if first is None or last is None:
        return []
    lengths = f"{short.sequence_length:,} to {long.sequence_length:,} tokens"
    each = "" if doublings == 1 else ", per doubling"
    value = (last / first) ** (1 / doublings)
    return [of_calls(f"{name}, {lengths}{each}", value, (one, other))]


def compute_15(own: Plan | None, seen: Evidence) -> Findings:
    """Computing the scores again adds about 15 % to the FLOPs of attention."""
    plan = llama_8b(TOKENS)
    full, causal = call_at(TOKENS, causal=False), call_at(TOKENS)
    older = training_plan(LLAMA_8B, A100_80, sequence_length=TOKENS)
    figures = (
        _more_flops("full mask, gradients in one kernel", plan, full, Variant.SDPA),
        _more_flops("full mask, gradients in two kernels", older, full, Variant.TRITON),
        _more_flops("causal mask, against eager's whole square", plan, causal, Variant.SDPA),
    )
    return findings(
        ABOUT_15,
        "Attention's own FLOPs, a full mask, and one kernel for all gradients: 7 products for 6.",
        "one product more is computed than the six of eager. Two gradient kernels compute three "
        "more; under a causal mask a fused kernel skips half of what eager computes",
        figures,
        (),
        (own, lambda p: _more_flops("", p, plan_call(p), Variant.SDPA)),
    )


def _more_flops(condition: str, plan: Plan, problem: AttentionProblem, variant: Variant) -> Figure:
    eager, fused = (call_flops(plan, problem, kind) for kind in (Variant.EAGER, variant))
    return Figure(
        condition=condition,
        value=fused / eager - 1,
        how=f"forward and backward: {fused / 1e12:.3g} against {eager / 1e12:.3g} TFLOP",
        opens=opens_call(plan, problem, (Variant.EAGER, variant)),
    )


def time_15(own: Plan | None, seen: Evidence) -> Findings:
    """15 % of time is given up for the memory."""
    plan, long, short = llama_8b(TOKENS), call_at(TOKENS), call_at(2048)
    figures = (
        _more_time(f"one call, 8,192 tokens: {SHAPE}", plan, long),
        _more_time(f"one call, 2,048 tokens: {SHAPE}", plan, short),
    )
    return findings(
        ABOUT_15,
        "None was found: what is computed again costs less than reading stored scores would.",
        "the call gets faster, not slower: it was bound by HBM traffic, which recomputing avoids",
        figures,
        [
            *measured_pair(seen, long, f"one call, 8,192 tokens: {SHAPE}", _seen_more_time),
            *measured_pair(
                seen, call_at(4096), f"one call, 4,096 tokens: {SHAPE}", _seen_more_time
            ),
        ],
        (own, lambda p: _more_time("", p, plan_call(p))),
    )


def _more_time(condition: str, plan: Plan, problem: AttentionProblem) -> Figure:
    eager, fused = (call_s(plan, problem, variant) for variant in PAIR)
    times = f"{format_seconds(fused)} against {format_seconds(eager)}"
    return Figure(
        condition=condition,
        value=fused / eager - 1,
        how=f"roofline of forward and backward: {times}",
        opens=opens_call(plan, problem),
    )


def _seen_more_time(eager: Seen, fused: Seen) -> float | None:
    slow_s, fast_s = seen_s(eager), seen_s(fused)
    return None if slow_s is None or fast_s is None else fast_s / slow_s - 1


def traffic_10(own: Plan | None, seen: Evidence) -> Findings:
    """HBM traffic falls by 10 times."""
    plan = llama_8b(TOKENS)
    figures = [
        _less_traffic(f"{tokens:,} tokens: {SHAPE}", plan, call_at(tokens))
        for tokens in (512, 2048, TOKENS)
    ]
    return findings(
        ABOUT_10,
        "A short sequence: the factor grows with it, by the bytes of a row of scores over those of "
        "Q, K, V and the output.",
        "the sequence has about 512 tokens of heads of 128; at 8,192 it is more than ten times that",
        figures,
        (),
        (own, lambda p: _less_traffic("", p, plan_call(p))),
    )


def _less_traffic(condition: str, plan: Plan, problem: AttentionProblem) -> Figure:
    eager, fused = (call_traffic_bytes(plan, problem, variant) for variant in PAIR)
    return Figure(
        condition=condition,
        value=eager / fused,
        how=f"forward and backward: eager {format_bytes(eager)}, sdpa {format_bytes(fused)}",
        opens=opens_call(plan, problem),
    )
