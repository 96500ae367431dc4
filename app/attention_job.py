"""The run that measures attention: its spec, its place in the queue, and whether the host can hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from app.proof import HOST_SHARE
from db import repository
from db.database import Database
from db.types import RunKind
from planner.attention.answer import AttentionAnswer, answer
from planner.attention.memory import input_bytes
from planner.attention.problem import AttentionProblem, Variant, parse_job
from planner.calibration import sheet_of
from planner.errors import PlanError
from planner.hardware import parse_gpu
from planner.units import format_bytes

# What runs without a GPU; the others are kernels for one.
CPU_VARIANTS = (Variant.EAGER, Variant.SDPA)
_REFERENCE_SCORE_BYTES = 40


def attention_spec(
    problem: AttentionProblem, variants: Sequence[Variant], world: str
) -> dict[str, Any]:
    """Return the job spec that measures variants of a problem (schema of the runners)."""
    given = {**problem.to_dict(), "kernels": [str(variant) for variant in variants]}
    return {
        "schema": 1,
        "kind": RunKind.ATTENTION.value,
        "world": world,
        "attention": given,
        "deadline_s": 900.0,
    }


def answer_of_run(
    spec: Mapping[str, Any],
    prediction: Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None,
) -> AttentionAnswer | None:
    """Return today's answer for what a run measured, on the GPU it was predicted for.

    A recorded row is predicted for its own GPU. None where that is no known one, or where the spec
    is another version's.
    """
    try:
        problem, variants = parse_job(spec.get("attention"))
        gpu = parse_gpu(prediction["gpu"]) if prediction else sheet_of(environment or {})
        return None if gpu is None else answer(problem, variants, gpu)
    except PlanError:
        return None


def queue(database: Database, found: AttentionAnswer, world: str, *, key: str, who: str) -> str:
    """Queue the run of an answer's variants; the same key never queues twice. Returns the run id."""
    return repository.create_run(
        database,
        attention_spec(found.problem, runnable(found, world), world),
        prediction=found.to_dict(),
        idempotency_key=key,
        who=who,
    )


def runnable(found: AttentionAnswer, world: str) -> list[Variant]:
    """Return the variants of an answer that can run in a world."""
    return [one.variant for one in found.variants if world != "cpu" or one.variant in CPU_VARIANTS]


def too_big_for_host(found: AttentionAnswer) -> str | None:
    """Return why a run on the CPU would not fit this host; None when it would."""
    problem, s = found.problem, float(found.problem.sequence_length)
    held = max(
        (one.backward_peak_bytes for one in found.variants if one.variant in CPU_VARIANTS),
        default=0,
    )
    # The float64 reference keeps about five matrices of scores of one row.
    reference = _REFERENCE_SCORE_BYTES * problem.heads * s * s
    needed = float(input_bytes(problem, s)) + max(held, reference)
    free = psutil.virtual_memory().available * HOST_SHARE
    if needed <= free:
        return None
    return (
        f"On the CPU this shape needs about {format_bytes(needed)} and this host can give "
        f"{format_bytes(free)}: choose a shorter sequence or fewer heads."
    )
