"""What a proof of the largest that fits runs, and what a machine lacks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.proof import check_provable, choose_world
from planner.attached import attached_gpus
from planner.errors import PlanError
from planner.limit_run import LimitRun, parse_limit
from planner.plan import Plan
from planner.reach import Reach, largest_that_runs


def limit_world(plan: Plan, world: str | None) -> str:
    """Return the world to prove a limit in, the best one if none is named.

    Raises PlanError with what this machine lacks.
    """
    check_provable(plan)
    found = attached_gpus()
    if not found.gpus:
        sentence = (
            "What fits a GPU is proven by running on one, and this machine has none: "
            f"{found.reason or 'no GPU is attached'}"
        ).rstrip(".")
        raise PlanError("world", world, "a machine with a GPU", sentence=f"{sentence}.")
    return world or choose_world(plan, len(found.gpus))


def limit_spec(plan: Plan, reach: Reach, world: str, deadline_s: float = 3600.0) -> dict[str, Any]:
    """Return the job spec that looks for a limit by short runs, beginning at the predicted edge.

    Raises PlanError where it cannot be looked for.
    """
    run = LimitRun(name=reach.name, predicted=reach.value)
    parse_limit(run.to_dict(), plan, world)
    asked = replace(run, edge=largest_that_runs(plan, reach.name, reach.value)).to_dict()
    return {
        "schema": 1,
        "kind": "limit",
        "world": world,
        "plan": plan.to_dict(),
        "limit": asked,
        "deadline_s": deadline_s,
    }
