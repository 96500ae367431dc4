"""What a person leaves open in a plan, and what an answer must keep to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from planner.checks import check_choice, check_integer, check_number
from planner.errors import PlanError
from planner.memory.parallel import group_size
from planner.plan import MAX_COUNT, MAX_TOKENS_PER_SEQUENCE, Plan
from planner.workload import Attention, Checkpointing, Engine, TrainingWorkload

SPLITS = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
_CHOICES = {"engine": Engine, "attention": Attention, "checkpointing": Checkpointing}
_RANGES: Mapping[str, tuple[int, int]] = {
    "zero_stage": (0, 3),
    "gpus": (1, MAX_COUNT),
    "micro_batch": (1, MAX_COUNT),
    "grad_accumulation": (1, MAX_COUNT),
    "sequence_length": (1, MAX_TOKENS_PER_SEQUENCE),
    **dict.fromkeys(SPLITS, (1, MAX_COUNT)),
}
AXES = (*_CHOICES, *_RANGES)
MAX_MARGIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an answer must keep to: sequences in a step of all GPUs, share of each GPU left free, GPUs."""

    global_batch: int | None = None
    margin: float = 0.0
    max_gpus: int | None = None

    def __post_init__(self) -> None:
        """Raise PlanError for a limit out of range."""
        check_number("sweep.margin", self.margin, 0.0, MAX_MARGIN)
        if self.global_batch is not None:
            check_integer("sweep.global_batch", self.global_batch, 1, MAX_COUNT**2)
        if self.max_gpus is not None:
            check_integer("sweep.max_gpus", self.max_gpus, 1, MAX_COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of each choice that is left open; `gpus` are all GPUs of the job.

    No values of `grad_accumulation`: it follows from the global batch.
    """

    engine: tuple[Engine, ...]
    zero_stage: tuple[int, ...]
    gpus: tuple[int, ...]
    tensor_parallel: tuple[int, ...]
    pipeline_parallel: tuple[int, ...]
    context_parallel: tuple[int, ...]
    expert_parallel: tuple[int, ...]
    micro_batch: tuple[int, ...]
    grad_accumulation: tuple[int, ...]
    sequence_length: tuple[int, ...]
    attention: tuple[Attention, ...]
    checkpointing: tuple[Checkpointing, ...]

    @property
    def combinations(self) -> int:
        """Number of combinations; what follows from the others does not count."""
        return prod(max(1, len(getattr(self, name))) for name in AXES)

    def splits(self) -> list[tuple[int, ...]]:
        """The values of each of `SPLITS`."""
        return [getattr(self, name) for name in SPLITS]


def axes_of(plan: Plan, given: Mapping[str, Sequence[Any] | None], limits: Limits) -> Axes:
    """Return the axes of a sweep around a training plan; what is not given has the plan's own value.

    `given` is by the names of `AXES`. Accumulation that is not given follows from a global batch.
    Raises PlanError for a serving plan, an unknown name, an empty list or a value out of range.
    """
    own = _own_values(plan)
    unknown = sorted(set(given) - set(AXES))
    if unknown:
        raise PlanError(f"sweep.{unknown[0]}", unknown[0], f"one of {', '.join(AXES)}")
    found: dict[str, Any] = {}
    for name in AXES:
        values = given.get(name)
        if values is None:
            follows = name == "grad_accumulation" and limits.global_batch is not None
            found[name] = () if follows else (own[name],)
        else:
            found[name] = _checked(name, values)
    return Axes(**found)


def _own_values(plan: Plan) -> dict[str, Any]:
    workload, parallelism = plan.workload, plan.parallelism
    if not isinstance(workload, TrainingWorkload):
        raise PlanError("job", str(plan.job), "train, as a sweep varies a training plan")
    gpus = parallelism.world_size * group_size(parallelism)
    parts = (parallelism, workload)
    found = {name: getattr(part, name) for part in parts for name in AXES if hasattr(part, name)}
    return {**found, "gpus": gpus}


def _checked(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    field = f"sweep.{name}"
    if not values:
        raise PlanError(field, list(values), "a list with at least one value")
    if name in _CHOICES:
        return tuple(dict.fromkeys(check_choice(field, value, _CHOICES[name]) for value in values))
    low, high = _RANGES[name]
    return tuple(dict.fromkeys(check_integer(field, value, low, high) for value in values))
