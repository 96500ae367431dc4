"""The worked examples of the texts: summaries, genes, what quality gains, 65B parameters on a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.attention.problem import AttentionProblem, Variant, is_exact
from planner.claims.cases import (
    A100_40,
    A100_80,
    DNA_1B,
    LLAMA_1B,
    LLAMA_3B,
    LLAMA_8B,
    LLAMA_65B,
    RTX_3090,
    SUMMARISER,
    attention_of,
    eight_ranks,
    llama_8b,
    needed_bytes,
    training_plan,
    variant_of,
    with_attention,
)
from planner.claims.claim import Bounds, Figure, Findings, Measured, Opens, Unit
from planner.claims.evidence import Evidence, of_calls
from planner.claims.figures import (
    call_s,
    findings,
    memory_of_step,
    opens_call,
    seen_s,
    speed_of_step,
)
from planner.claims.kernels import SHAPE, TOKENS, call_at
from planner.hardware import resolve_gpu
from planner.paper import paper_state_bytes
from planner.plan import Plan
from planner.units import GB_BYTES, format_bytes, format_gb, format_seconds
from planner.workload import Attention

# The texts' round numbers are given a tenth to either side.
THREE_TIMES = Bounds(unit=Unit.TIMES, low=2.7, high=3.3)
TWENTY_TWO_TIMES = Bounds(unit=Unit.TIMES, low=19.8, high=24.2)
DNA_TOKENS = 100_000
SMALL_TOKENS = 512


def _summaries(**workload: Any) -> Plan:
    return training_plan(SUMMARISER, A100_80, sequence_length=TOKENS, micro_batch=2, **workload)


def _at_8k(model: Mapping[str, Any], spread: Mapping[str, Any] | None = None) -> Plan:
    return training_plan(model, A100_80, spread, sequence_length=TOKENS)


def summaries_memory(own: Plan | None, seen: Evidence) -> Findings:
    """48 GB become 16 GB: a third, at 8K tokens on an A100."""
    figures = (
        memory_of_step(_summaries(), "GPT-2 (124M), 2 × 8,192 tokens, A100 80 GB"),
        memory_of_step(_summaries(checkpointing="full"), "the same, checkpointing full"),
        memory_of_step(_at_8k(LLAMA_1B), "Llama-3.2-1B, 1 × 8,192 tokens, A100 80 GB"),
    )
    return findings(
        THREE_TIMES,
        "A small model of few heads without checkpointing; the text names none. 48 over 16 is 3.",
        "the model is small: GPT-2's step comes close to the text's two numbers. With "
        "checkpointing eager keeps one layer's matrices alone, and 1B parameters have more heads",
        figures,
    )


def summaries_speed(own: Plan | None, seen: Evidence) -> Findings:
    """3 samples a second become 9."""
    figures = (
        speed_of_step(_summaries(), "GPT-2 (124M), 2 × 8,192 tokens, A100 80 GB"),
        speed_of_step(_at_8k(LLAMA_1B), "Llama-3.2-1B, 1 × 8,192 tokens, A100 80 GB"),
        speed_of_step(_at_8k(LLAMA_8B, eight_ranks()), "Llama-3.1-8B, ZeRO-3 × 8, A100 80 GB"),
        speed_of_step(_at_8k(LLAMA_3B), "Llama-3.2-3B, 1 × 8,192 tokens, A100 80 GB"),
    )
    return findings(
        THREE_TIMES,
        "A step in which eager attention takes two thirds of the time; the text names no model.",
        "attention is two thirds of eager's step, as for 3B parameters at 8K tokens, where eager "
        "does not fit the card; smaller models gain more, larger ones less",
        figures,
    )


def _dna(**workload: Any) -> Plan:
    return training_plan(DNA_1B, A100_40, sequence_length=DNA_TOKENS, **workload)


def _needs(condition: str, plan: Plan) -> Figure:
    return Figure(
        condition=condition,
        value=needed_bytes(plan),
        how=f"device bytes of a step on {plan.hardware.name}",
        opens=Opens(plan=plan),
    )


def genes_without(own: Plan | None, seen: Evidence) -> Findings:
    """Standard attention at 100K tokens needs more than 200 GB."""
    plan = _dna()
    problem = attention_of(plan)
    eager = with_attention(_dna(checkpointing="full"), Attention.EAGER)
    figures = (
        Figure(
            condition="one call, 32/8 heads of 64, 100,000 tokens",
            value=variant_of(plan, problem, Variant.EAGER).device_bytes,
            how="device bytes of one eager attention call, forward and backward",
            opens=opens_call(plan, problem),
        ),
        _needs("step of a 1B model, checkpointing full, eager", eager),
    )
    return findings(
        Bounds(unit=Unit.BYTES, low=200 * GB_BYTES),
        "Stored scores of several heads.",
        "it is far more than that: terabytes",
        figures,
    )


def genes_memory(own: Plan | None, seen: Evidence) -> Findings:
    """With a fused kernel 100K tokens fit an A100 of 40 GB."""
    full = _dna(checkpointing="full")
    figures = (
        _needs("1B model, fused kernel, checkpointing full", full),
        _needs("1B model, fused kernel, no checkpointing", _dna()),
        _needs("1B model, eager, checkpointing full", with_attention(full, Attention.EAGER)),
    )
    return findings(
        Bounds(unit=Unit.BYTES, high=resolve_gpu(A100_40).visible_bytes),
        "Checkpointed layers, a small vocabulary (512) and about 1B parameters. Sparse attention "
        "is not needed for memory: a fused kernel stores no scores of any pattern.",
        "layers are checkpointed too; the kernel alone is not enough for a model of that size",
        figures,
    )


def genes_speed(own: Plan | None, seen: Evidence) -> Findings:
    """Sparse and fused, 100K tokens are 22 times faster than standard attention."""
    plan = _dna()
    figures = (
        _sparse_speed(plan, Variant.EAGER, 4096),
        _sparse_speed(plan, Variant.SDPA, 4096),
        _sparse_speed(plan, Variant.SDPA, 1536),
    )
    return findings(
        TWENTY_TWO_TIMES,
        "What it is compared with, and how much of the sequence a query still sees: the standard "
        "implementation cannot run at 100K tokens, so the factor has no measured base.",
        "it is compared with exact fused attention and a query sees about 1,700 of 100,000 tokens: "
        "that is another model. Against eager attention it would be hundreds",
        figures,
        _sparse_measured(seen),
    )


def _sparse_speed(plan: Plan, base: Variant, window: int) -> Figure:
    problem = attention_of(plan, window=window)
    slow_s, fast_s = (call_s(plan, problem, kind) for kind in (base, Variant.GLOBAL_LOCAL))
    return Figure(
        condition=f"window {window:,} + {problem.global_tokens} global tokens, against {base}",
        value=slow_s / fast_s,
        how=f"roofline of a call: {format_seconds(slow_s)} over {format_seconds(fast_s)}",
        opens=opens_call(plan, problem, (base, Variant.GLOBAL_LOCAL)),
    )


def _sparse_measured(seen: Evidence) -> list[Measured]:
    found = []
    for base in (Variant.EAGER, Variant.SDPA):
        slow = seen.call(call_at(TOKENS), base)
        fast = seen.call(call_at(TOKENS), Variant.GLOBAL_LOCAL)
        slow_s, fast_s = (None if one is None else seen_s(one) for one in (slow, fast))
        if slow is not None and fast is not None and slow_s is not None and fast_s is not None:
            words = f"8,192 tokens, window 4,096 + 128, against {base}: {SHAPE}"
            found.append(of_calls(words, slow_s / fast_s, (slow, fast)))
    return found


def quality(own: Plan | None, seen: Evidence) -> Findings:
    """Results get better by 11 % or more."""
    problem = call_at(TOKENS)
    figures = [
        Figure(
            condition=f"{variant}: change of what attention computes",
            value=_change(problem, variant),
            how="an exact kernel computes the same function of the same weights",
            opens=opens_call(llama_8b(TOKENS), problem),
        )
        for variant in (Variant.SDPA, Variant.TRITON)
    ]
    measured = [
        of_calls(f"{variant}: error against float64, norm over norm", one.error, (one,))
        for variant in (Variant.SDPA, Variant.TRITON, Variant.EAGER)
        if (one := seen.call(problem, variant)) is not None and one.error is not None
    ]
    return findings(
        Bounds(unit=Unit.SHARE, low=0.11),
        "None of the kernel's. A longer input, or another model, may give better results: that is a "
        "matter of data, which no planner of memory and speed predicts.",
        "an exact kernel changes results by rounding alone, and rounds less than eager attention",
        figures,
        measured,
    )


def _change(problem: AttentionProblem, variant: Variant) -> float:
    return 0.0 if is_exact(problem, variant) else float("inf")


def card_65b(own: Plan | None, seen: Evidence) -> Findings:
    """65B parameters are fine-tuned on a card of 24 GB."""
    gpu = resolve_gpu(RTX_3090)
    adapters = {"lora_rank": 16, "precision": "bf16"}
    shared = _card(eight_ranks(), **adapters)
    parameters = shared.model.parameters
    alone = {"engine": "ddp", "zero_stage": 0, "world_size": 1}
    states = paper_state_bytes(parameters, 0, 1)
    many = {**eight_ranks(), "world_size": 64}
    figures = (
        Figure(
            condition="all parameters, one card: training state alone",
            value=states,
            how=f"16 B × {parameters:,} parameters = {format_gb(states)}",
        ),
        _needs("4-bit weights and LoRA 16, one card", _card(alone, base_dtype="nf4", **adapters)),
        _needs("LoRA 16 on bf16 weights, ZeRO-3 over 8 cards", shared),
        _needs("all parameters, ZeRO-3 over 64 cards", _card(many)),
        _needs("the same with eager attention", with_attention(_card(many), Attention.EAGER)),
    )
    return findings(
        Bounds(unit=Unit.BYTES, high=gpu.visible_bytes),
        f"More cards than one ({format_bytes(gpu.visible_bytes)} each), sharded weights, adapters; "
        "512 tokens, checkpointing full.",
        "the weights are spread over several cards by ZeRO-3. FlashAttention does not do it: eager "
        "attention fits as well, and on one card even 4-bit weights do not",
        figures,
    )


def _card(spread: dict[str, Any], **workload: Any) -> Plan:
    return training_plan(
        LLAMA_65B,
        RTX_3090,
        spread,
        sequence_length=SMALL_TOKENS,
        checkpointing="full",
        **workload,
    )
