"""Claims about ZeRO's saving as a fixed number."""

from __future__ import annotations

from dataclasses import replace

from planner.claims.cases import (
    H200,
    LLAMA_8B,
    eight_ranks,
    peak_bytes,
    training_of,
    training_plan,
)
from planner.claims.claim import Bounds, Figure, Findings, Measured, Opens, Unit
from planner.claims.evidence import Evidence, of_steps
from planner.claims.figures import findings
from planner.obstacles import check_training
from planner.paper import paper_state_bytes
from planner.plan import Plan
from planner.units import format_bytes, format_gb

WORLDS = (8, 64, 1024)
# A fixed number is given a twentieth to either side.
FOUR = Bounds(unit=Unit.TIMES, low=3.8, high=4.2)
EIGHT = Bounds(unit=Unit.TIMES, low=7.6, high=8.4)
STEP = "peak of a step: Llama-3.1-8B, 8 ranks, 4,096 tokens"


def zero_4(own: Plan | None, seen: Evidence) -> Findings:
    """Stage 1 divides the training state by 4."""
    return _stage(1, FOUR, own, seen)


def zero_8(own: Plan | None, seen: Evidence) -> Findings:
    """Stage 2 divides the training state by 8."""
    return _stage(2, EIGHT, own, seen)


def _stage(stage: int, bounds: Bounds, own: Plan | None, seen: Evidence) -> Findings:
    return findings(
        bounds,
        "Training state alone (no activations, buffers or allocator), 2 + 2 + 12 bytes a parameter, "
        "and very many ranks: the number is the limit for N without end.",
        "states alone are counted, in mixed precision with Adam, over many ranks. On 8 it is less, "
        "and of a step's whole peak less again: activations are not sharded",
        [*(_states(stage, world) for world in WORLDS), _peak(_step(), stage, STEP)],
        _measured(stage, seen),
        (own, lambda plan: _peak(plan, stage, "")),
    )


def _states(stage: int, world_size: int) -> Figure:
    parameters = _step().model.parameters
    whole = paper_state_bytes(parameters, 0, world_size)
    left = paper_state_bytes(parameters, stage, world_size)
    return Figure(
        condition=f"states alone, {world_size:,} ranks",
        value=whole / left,
        how=f"the ZeRO paper's formula: {format_gb(whole)} over {format_gb(left)} a rank",
    )


def _step(zero_stage: int = 3) -> Plan:
    return training_plan(LLAMA_8B, H200, eight_ranks(zero_stage), sequence_length=4096)


def _with_stage(plan: Plan, zero_stage: int) -> Plan:
    parallelism = replace(plan.parallelism, zero_stage=zero_stage)
    check_training(plan.model, training_of(plan), parallelism)
    return replace(plan, parallelism=parallelism)


def _peak(plan: Plan, stage: int, condition: str) -> Figure:
    whole, sharded = _with_stage(plan, 0), _with_stage(plan, stage)
    sizes = f"{format_bytes(peak_bytes(whole))}, stage {stage} {format_bytes(peak_bytes(sharded))}"
    return Figure(
        condition=condition,
        value=peak_bytes(whole) / peak_bytes(sharded),
        how=f"allocated peak with engine {plan.parallelism.engine}: stage 0 {sizes}",
        opens=Opens(plan=sharded),
    )


def _measured(stage: int, seen: Evidence) -> list[Measured]:
    whole, sharded = seen.step(_step(0)), seen.step(_step(stage))
    if whole is None or sharded is None:
        return []
    value = whole.measured["allocated_bytes"] / sharded.measured["allocated_bytes"]
    return [of_steps(STEP, value, (whole, sharded), seen.here)]
