"""The example of a 3-D image: attention over its voxels, and over blocks of them.

512 x 512 x 512 voxels, each a token of 8 heads of 64, in 16 bits, every pair seen. A block of 64 x 64
voxels of a slice has 4,096 tokens; a slice has 64 of them.
"""

from __future__ import annotations

from planner.attention.memory import footprint, input_bytes
from planner.attention.problem import AttentionProblem, Variant
from planner.claims.cases import A100_80, LLAMA_1B, SUMMARISER, attention_of, training_plan
from planner.claims.claim import Bounds, Figure, Findings, Unit
from planner.claims.evidence import Evidence
from planner.claims.figures import (
    call_s,
    findings,
    measured_pair,
    opens_call,
    seen_speed,
    speed_of_step,
)
from planner.plan import Plan
from planner.units import GB_BYTES, format_seconds, format_share

SIDE, BLOCK_SIDE = 512, 64
VOXELS = SIDE**3
BLOCK_TOKENS = BLOCK_SIDE**2
LONG_TOKENS = 12_288
CUBE_TOKENS = BLOCK_SIDE**3
BLOCKS_OF_SLICE = (SIDE // BLOCK_SIDE) ** 2
# 7 days over 1.5, a tenth to either side.
SEVEN_TO_ONE_AND_A_HALF = Bounds(unit=Unit.TIMES, low=0.9 * 7 / 1.5, high=1.1 * 7 / 1.5)


def _plan() -> Plan:
    return training_plan(LLAMA_1B, A100_80)


def _call(tokens: int, batch: int = 1, heads: int = 8) -> AttentionProblem:
    # Built without the limits of what a person may enter: an image has more tokens than 2^24.
    return AttentionProblem(
        batch=batch,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        sequence_length=tokens,
        causal=False,
    )


def _holds(condition: str, problem: AttentionProblem, variant: Variant) -> Figure:
    """Return Q, K, V, their gradients and all that a call holds at its peak."""
    plan = _plan()
    length = float(problem.sequence_length)
    held = footprint(problem, variant, plan.hardware, length).peak_bytes()
    shows = problem.sequence_length < VOXELS
    return Figure(
        condition=condition,
        value=float(held + input_bytes(problem, length)),
        how=f"{problem.batch:,} × {problem.sequence_length:,} tokens, {problem.heads} heads of 64, {variant}",
        opens=opens_call(plan, problem) if shows else None,
    )


def image_pixels(own: Plan | None, seen: Evidence) -> Findings:
    """Attention over all voxels needs more than 80 GB."""
    figures = (
        _holds("whole image, 1 head, eager", _call(VOXELS, heads=1), Variant.EAGER),
        _holds("whole image, 1 head, fused", _call(VOXELS, heads=1), Variant.SDPA),
    )
    return findings(
        Bounds(unit=Unit.BYTES, low=80 * GB_BYTES),
        "One call over 134 million tokens.",
        "it needs petabytes with stored scores, and more than 80 GB for Q, K and V alone with a "
        "fused kernel: FlashAttention by itself does not make this possible",
        figures,
    )


def image_blocks(own: Plan | None, seen: Evidence) -> Findings:
    """Blocks of 64 x 64 bring the image to 18 GB."""
    slices = SIDE * BLOCKS_OF_SLICE
    figures = (
        _holds(
            "the 64 blocks of a slice, fused", _call(BLOCK_TOKENS, BLOCKS_OF_SLICE), Variant.SDPA
        ),
        _holds(
            "the 64 blocks of a slice, eager", _call(BLOCK_TOKENS, BLOCKS_OF_SLICE), Variant.EAGER
        ),
        _holds("one block, eager", _call(BLOCK_TOKENS), Variant.EAGER),
        _holds("all slices at once, fused", _call(BLOCK_TOKENS, slices), Variant.SDPA),
        _holds("one block of 64 x 64 x 64, fused", _call(CUBE_TOKENS), Variant.SDPA),
        _holds("one block of 64 x 64 x 64, eager", _call(CUBE_TOKENS), Variant.EAGER),
    )
    return findings(
        Bounds(unit=Unit.BYTES, high=18 * GB_BYTES),
        "A few blocks at a time. Blocks change the model: voxels of two blocks do not see each other.",
        "a slice or so is computed at a time; one block of 4,096 tokens fits with eager attention too",
        figures,
    )


def image_days(own: Plan | None, seen: Evidence) -> Findings:
    """7 days become 1.5."""
    plan, block = _plan(), _call(BLOCK_TOKENS, BLOCKS_OF_SLICE)
    eager_s, fused_s = (call_s(plan, block, kind) for kind in (Variant.EAGER, Variant.SDPA))
    whole_s = call_s(plan, _call(VOXELS), Variant.SDPA)
    long = {**SUMMARISER, "overrides": {"max_position_embeddings": LONG_TOKENS}}
    all_blocks_s = SIDE * fused_s
    figures = (
        Figure(
            condition="attention in blocks, eager against fused",
            value=eager_s / fused_s,
            how=f"roofline of a slice: {format_seconds(eager_s)} over {format_seconds(fused_s)}",
            opens=opens_call(plan, block),
        ),
        Figure(
            condition="fused attention, whole image against blocks",
            value=whole_s / all_blocks_s,
            how=f"roofline: {format_seconds(whole_s)} over {format_seconds(all_blocks_s)}",
        ),
        speed_of_step(
            training_plan(long, A100_80, sequence_length=LONG_TOKENS, checkpointing="full"),
            "a step in which eager attention is four fifths: GPT-2, 12,288 tokens, checkpointing full",
        ),
    )
    measured = attention_of(
        plan, batch=4, heads=32, kv_heads=8, head_dim=64, sequence_length=BLOCK_TOKENS, causal=False
    )
    return findings(
        SEVEN_TO_ONE_AND_A_HALF,
        f"A base that ran: attention over all voxels cannot. {format_share(1 - 1.5 / 7, 0)} of the 7 days must "
        "have been attention, even if it now took no time at all.",
        "attention was four fifths of the old step and what the old one computed is what the new "
        "one does. Blocks alone make attention thousands of times faster, as another model",
        figures,
        measured_pair(
            seen, measured, "one call, 4 × 4,096 tokens, 32/8 heads of 64, full", seen_speed
        ),
    )
