"""Which ZeRO stages an engine has, as the planner's own checks say."""

from __future__ import annotations

from planner.errors import PlanError
from planner.obstacles import check_parallelism
from planner.workload import Engine, Parallelism

STAGES = (0, 1, 2, 3)


def possible_stages(engine: str) -> tuple[int, ...]:
    """Return the ZeRO stages that an engine has."""
    return tuple(stage for stage in STAGES if _has(Engine(engine), stage))


def _has(engine: Engine, stage: int) -> bool:
    try:
        check_parallelism(Parallelism(engine=engine, zero_stage=stage))
    except PlanError:
        return False
    return True
