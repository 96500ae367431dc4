"""Figures that several claims share: two kernels compared in a call or a step, and runs of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from planner.attention.measured import Seen
from planner.attention.problem import AttentionProblem, Variant
from planner.claims.cases import (
    attention_of,
    memory_factor,
    needed_bytes,
    peak_bytes,
    speed_factor,
    step_s,
    variant_of,
    with_attention,
)
from planner.claims.claim import Bounds, Figure, Findings, Measured, Opens
from planner.claims.evidence import Evidence, of_calls, of_steps
from planner.errors import PlanError
from planner.plan import Plan
from planner.units import format_bytes, format_seconds
from planner.workload import Attention

OWN_CONDITION = "your plan"
# What a person compares in a step; the plan's own kernel is one of the two where it can be.
PAIR = (Variant.EAGER, Variant.SDPA)
Compute = Callable[[Plan], Figure]


def findings(
    bounds: Bounds,
    needs: str,
    because: str,
    figures: Iterable[Figure],
    measured: Iterable[Measured] = (),
    own: tuple[Plan | None, Compute] | None = None,
) -> Findings:
    """Return findings with, where there is one, the figure of the person's plan at their end."""
    mine: tuple[Figure, ...] = ()
    left_out = None
    if own is not None and own[0] is not None:
        mine, left_out = _own_figure(own[0], own[1])
    return Findings(
        bounds=bounds,
        needs=needs,
        because=because,
        figures=(*figures, *mine),
        measured=tuple(measured),
        left_out=left_out,
    )


def _own_figure(plan: Plan, compute: Compute) -> tuple[tuple[Figure, ...], str | None]:
    try:
        figure = compute(plan)
    except PlanError as problem:
        return (), str(problem)
    return (replace(figure, own=True, condition=OWN_CONDITION),), None


def call_bytes(plan: Plan, problem: AttentionProblem, variant: Variant) -> int:
    """Return the peak of a call's forward and backward beside Q, K, V and the output's gradient."""
    one = variant_of(plan, problem, variant)
    return max(one.forward_peak_bytes, one.backward_peak_bytes)


def call_s(plan: Plan, problem: AttentionProblem, variant: Variant) -> float:
    """Return the roofline time of a call's forward and backward."""
    one = variant_of(plan, problem, variant)
    return one.forward.roofline_s + one.backward.roofline_s


def call_traffic_bytes(plan: Plan, problem: AttentionProblem, variant: Variant) -> float:
    """Return the HBM bytes of a call's forward and backward."""
    one = variant_of(plan, problem, variant)
    return one.forward.hbm_bytes + one.backward.hbm_bytes


def call_flops(plan: Plan, problem: AttentionProblem, variant: Variant) -> float:
    """Return the FLOPs of a call's forward and backward."""
    one = variant_of(plan, problem, variant)
    return one.forward.flops + one.backward.flops


def opens_call(
    plan: Plan, problem: AttentionProblem, variants: tuple[Variant, ...] = PAIR
) -> Opens:
    """Return what shows an attention call."""
    return Opens(plan=plan, problem=problem, variants=variants)


def saved_by_call(plan: Plan, problem: AttentionProblem, condition: str) -> Figure:
    """Return the share of a call's memory that sdpa saves of eager's."""
    eager, fused = (call_bytes(plan, problem, variant) for variant in PAIR)
    return Figure(
        condition=condition,
        value=1 - fused / eager,
        how=f"peak of the call: eager {format_bytes(eager)}, sdpa {format_bytes(fused)}",
        opens=opens_call(plan, problem),
    )


def saved_by_step(plan: Plan, condition: str) -> Figure:
    """Return the share of a training step's allocated peak that sdpa saves of eager's."""
    return replace(
        memory_of_step(plan, condition),
        value=1 - 1 / memory_factor(plan),
    )


def memory_of_step(plan: Plan, condition: str) -> Figure:
    """Return how many times less a training step's allocated peak is with sdpa than with eager."""
    eager, fused = _both(plan)
    sizes = f"eager {_size(eager)}, sdpa {_size(fused)}"
    return Figure(
        condition=condition,
        value=memory_factor(plan),
        how=f"allocated peak of the step: {sizes}",
        opens=Opens(plan=fused),
    )


def _size(plan: Plan) -> str:
    lacking = needed_bytes(plan) > plan.hardware.visible_bytes
    return format_bytes(peak_bytes(plan)) + (" (does not fit)" if lacking else "")


def speed_of_step(plan: Plan, condition: str) -> Figure:
    """Return how many times faster a training step is with sdpa than with eager attention."""
    eager, fused = _both(plan)
    times = f"eager {format_seconds(step_s(eager))}, sdpa {format_seconds(step_s(fused))}"
    return Figure(
        condition=condition,
        value=speed_factor(plan),
        how=f"predicted step: {times}",
        opens=Opens(plan=fused),
    )


def _both(plan: Plan) -> tuple[Plan, Plan]:
    return with_attention(plan, Attention.EAGER), with_attention(plan, Attention.SDPA)


def measured_pair(
    seen: Evidence,
    problem: AttentionProblem,
    condition: str,
    compute: Callable[[Seen, Seen], float | None],
) -> list[Measured]:
    """Return what runs of eager and sdpa at exactly a problem give; nothing where either lacks."""
    eager, fused = (seen.call(problem, variant) for variant in PAIR)
    if eager is None or fused is None:
        return []
    value = compute(eager, fused)
    return [] if value is None else [of_calls(condition, value, (eager, fused))]


def measured_steps(
    seen: Evidence, plan: Plan, condition: str, compute: Callable[[float], float], quantity: str
) -> list[Measured]:
    """Return `compute` of eager's over sdpa's `quantity` where runs of both made the plan's step."""
    eager, fused = (seen.step(one) for one in _both(plan))
    if eager is None or fused is None or not fused.measured.get(quantity):
        return []
    value = compute(eager.measured[quantity] / fused.measured[quantity])
    return [of_steps(condition, value, (eager, fused), seen.here)]


def seen_bytes(one: Seen) -> int | None:
    """Return the peak that a call's tensors asked for, in the larger direction."""
    forward, backward = one.forward_peak_requested_bytes, one.backward_peak_requested_bytes
    return None if forward is None or backward is None else max(forward, backward)


def seen_s(one: Seen) -> float | None:
    """Return the measured time of a call's forward and backward."""
    if one.forward_s is None or one.backward_s is None:
        return None
    return one.forward_s + one.backward_s


def seen_saving(eager: Seen, fused: Seen) -> float | None:
    """Return the share of memory that was measured to be saved."""
    held, kept = seen_bytes(eager), seen_bytes(fused)
    return None if held is None or kept is None else 1 - kept / held


def seen_speed(eager: Seen, fused: Seen) -> float | None:
    """Return how many times faster the fused call was measured to be."""
    slow_s, fast_s = seen_s(eager), seen_s(fused)
    return None if slow_s is None or fast_s is None else slow_s / fast_s


def plan_call(plan: Plan) -> AttentionProblem:
    """Return the attention call of a plan's own layer."""
    return attention_of(plan)
