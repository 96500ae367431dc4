"""Claims about a whole training step: how much less, how much faster, how long a sequence."""

from __future__ import annotations

from planner.attention.problem import Variant
from planner.claims.cases import (
    A100_80,
    H200,
    LLAMA_1B,
    LLAMA_8B,
    eight_ranks,
    llama_8b,
    longest_step,
    training_plan,
    with_attention,
)
from planner.claims.claim import Bounds, Figure, Findings, Measured, Opens, Unit
from planner.claims.evidence import Evidence
from planner.claims.figures import (
    call_s,
    findings,
    measured_pair,
    measured_steps,
    memory_of_step,
    opens_call,
    seen_bytes,
    seen_speed,
    speed_of_step,
)
from planner.claims.kernels import SHAPE, TOKENS, call_at
from planner.plan import Plan
from planner.workload import Attention, Loss

STEP = "Llama-3.1-8B, ZeRO-3 × 8"
THREE_TO_FIVE = Bounds(unit=Unit.TIMES, low=3.0, high=5.0)
TWO_TO_FOUR = Bounds(unit=Unit.TIMES, low=2.0, high=4.0)
# "Only 2K" is given from 1,536 to 3,072 tokens: the nearest power of two.
ABOUT_2K = Bounds(unit=Unit.TOKENS, low=1536, high=3072)
FROM_8K = Bounds(unit=Unit.TOKENS, low=8192)
FROM_100K = Bounds(unit=Unit.TOKENS, low=100_000)


def memory_3_5(own: Plan | None, seen: Evidence) -> Findings:
    """A training step's memory falls by 3 to 5 times."""
    figures = [
        memory_of_step(llama_8b(tokens), f"{STEP}, {tokens:,} tokens")
        for tokens in (2048, 4096, TOKENS)
    ]
    figures.append(
        memory_of_step(llama_8b(TOKENS, "full"), f"{STEP}, {TOKENS:,} tokens, checkpointing full")
    )
    return findings(
        THREE_TO_FIVE,
        "No checkpointing, so that eager attention keeps every layer's matrices, and a length where "
        "they are most of the peak but not nearly all.",
        "the model has 4,096 tokens or so and nothing is checkpointed. It is less for shorter "
        "sequences and with checkpointing, more for longer ones",
        figures,
        [
            *_measured_steps(seen, "allocated_bytes"),
            *measured_pair(
                seen,
                call_at(4096),
                f"one call alone, 4,096 tokens: {SHAPE}",
                lambda eager, fused: _ratio(seen_bytes(eager), seen_bytes(fused)),
            ),
        ],
        (own, lambda plan: memory_of_step(plan, "")),
    )


def _measured_steps(seen: Evidence, quantity: str) -> list[Measured]:
    """Return eager over sdpa of every step of the claim that runs of both kernels made."""
    plans = {
        f"step of {STEP}, {tokens:,} tokens{words}": llama_8b(tokens, checkpointing)
        for checkpointing, words in (("none", ""), ("full", ", checkpointing full"))
        for tokens in (2048, 4096, TOKENS)
    }
    return [
        one
        for condition, plan in plans.items()
        for one in measured_steps(seen, plan, condition, lambda ratio: ratio, quantity)
    ]


def _ratio(held: float | None, kept: float | None) -> float | None:
    return None if held is None or kept is None else held / kept


def speed_2_4(own: Plan | None, seen: Evidence) -> Findings:
    """Attention, or the step, is 2 to 4 times faster."""
    plan = llama_8b(TOKENS)
    eager, fused = (call_s(plan, call_at(TOKENS), kind) for kind in (Variant.EAGER, Variant.SDPA))
    call = Figure(
        condition=f"one call, 8,192 tokens: {SHAPE}",
        value=eager / fused,
        how="roofline of forward and backward, eager over sdpa",
        opens=opens_call(plan, call_at(TOKENS)),
    )
    steps = [
        speed_of_step(llama_8b(tokens), f"step of {STEP}, {tokens:,} tokens")
        for tokens in (2048, TOKENS)
    ]
    return findings(
        TWO_TO_FOUR,
        "A whole step in which attention takes a half to three quarters of eager's time.",
        "a whole step at about 8K tokens is meant. The call alone is faster by more than that "
        "against eager attention as transformers writes it; a step at 2K by less",
        [call, *steps],
        [
            *_measured_steps(seen, "step_time_s"),
            *measured_pair(seen, call_at(TOKENS), f"one call, 8,192 tokens: {SHAPE}", seen_speed),
            *measured_pair(seen, call_at(4096), f"one call, 4,096 tokens: {SHAPE}", seen_speed),
        ],
        (own, lambda own_plan: speed_of_step(own_plan, "")),
    )


def _longest(condition: str, plan: Plan, attention: Attention) -> Figure:
    tried = with_attention(plan, attention)
    return Figure(
        condition=condition,
        value=longest_step(tried),
        how=f"longest step that fits {plan.hardware.name}, attention {attention}",
        opens=Opens(plan=tried),
    )


def _on_a100(model: str) -> Plan:
    if model == "1B":
        return training_plan(LLAMA_1B, A100_80)
    return training_plan(LLAMA_8B, A100_80, eight_ranks())


def _longest_on_a100(attention: Attention) -> list[Figure]:
    small, large = _on_a100("1B"), _on_a100("8B")
    checkpointed = training_plan(LLAMA_8B, A100_80, eight_ranks(), checkpointing="full")
    return [
        _longest("Llama-3.2-1B, A100 80 GB", small, attention),
        _longest(f"{STEP}, A100 80 GB", large, attention),
        _longest(f"{STEP}, A100 80 GB, checkpointing full", checkpointed, attention),
    ]


def standard_2k(own: Plan | None, seen: Evidence) -> Findings:
    """Standard attention reaches 2K tokens on an A100."""
    figures = _longest_on_a100(Attention.EAGER)
    return findings(
        ABOUT_2K,
        "A model of about 8B parameters over eight cards, eager attention, no checkpointing.",
        "the model is that large and nothing is checkpointed; smaller ones and checkpointed steps "
        "reach further with eager attention too",
        figures,
        (),
        (own, lambda plan: _longest("", plan, Attention.EAGER)),
    )


def flash_8k(own: Plan | None, seen: Evidence) -> Findings:
    """The same models take 8K tokens with a fused kernel."""
    figures = _longest_on_a100(Attention.SDPA)
    return findings(
        FROM_8K,
        "An A100 with 80 GB, and room for what else grows with the sequence: activations and logits.",
        "the model is small, or its layers are checkpointed: without stored scores, activations and "
        "logits are the next limit, and 8B parameters over eight cards meet it below 8K",
        figures,
        (),
        (own, lambda plan: _longest("", plan, Attention.SDPA)),
    )


def flash_100k(own: Plan | None, seen: Evidence) -> Findings:
    """A fused kernel makes 100K tokens and more possible."""
    figures = [
        _longest(
            f"{STEP}, H200{words}",
            training_plan(LLAMA_8B, H200, eight_ranks(), **more),
            kind,
        )
        for words, more, kind in (
            (", checkpointing full, loss fused_linear", _LEAST, Attention.SDPA),
            (", checkpointing full", {"checkpointing": "full"}, Attention.SDPA),
            ("", {}, Attention.SDPA),
            (", checkpointing full, loss fused_linear, eager", _LEAST, Attention.EAGER),
        )
    ]
    return findings(
        FROM_100K,
        "Checkpointed layers and a loss that stores no logits, beside the fused kernel.",
        "layers are checkpointed and logits are not stored: the kernel alone is not enough, and "
        "without it the rest is not either",
        figures,
        (),
        (own, lambda plan: _longest("", plan, Attention.SDPA)),
    )


_LEAST = {"checkpointing": "full", "loss": str(Loss.FUSED_LINEAR)}
