"""Many plans at once: memory, verdict and speed over stage, world size, micro-batch, length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checks import check_integer
from planner.comparison import plan_traits
from planner.error_history import ratios_by_stage
from planner.errors import PlanError
from planner.memory.overheads import outside_bytes
from planner.memory.parallel import is_split
from planner.memory.stages import step_grid, step_memory, step_segment_share
from planner.obstacles import check_parallelism, check_training
from planner.plan import MAX_COUNT, MAX_TOKENS_PER_SEQUENCE, Plan
from planner.splits import check_splits
from planner.throughput import training_speed_grid
from planner.verdict import judge_grid
from planner.workload import TrainingWorkload

MAX_GRID_POINTS = 1_000_000
_AXES = ("zero_stage", "world_size", "micro_batch", "sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values of every quantity over four axes, in the order of `axes`."""

    axes: dict[str, tuple[int, ...]]
    values: dict[str, NDArray[Any]]

    @property
    def size(self) -> int:
        """Number of plans in the grid."""
        return int(self.values["device_bytes"].size)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield one plain dictionary per plan: its coordinates and its values."""
        names = list(self.values)
        flat = [self.values[name].ravel().tolist() for name in names]
        grids = np.meshgrid(*(np.asarray(v) for v in self.axes.values()), indexing="ij")
        coordinates = [grid.ravel().tolist() for grid in grids]
        for row in zip(*coordinates, *flat, strict=True):
            yield dict(zip([*self.axes, *names], row, strict=True))


def _check_axis(name: str, values: Sequence[int], low: int, high: int) -> tuple[int, ...]:
    if not values:
        raise PlanError(f"grid.{name}", list(values), "a list with at least one value")
    return tuple(check_integer(f"grid.{name}", value, low, high) for value in values)


def _checked_axes(
    plan: Plan,
    workload: TrainingWorkload,
    given: Sequence[Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    limits = ((0, 3), (1, MAX_COUNT), (1, MAX_COUNT), (1, MAX_TOKENS_PER_SEQUENCE))
    axes = {
        name: _check_axis(name, values, low, high)
        for name, values, (low, high) in zip(_AXES, given, limits, strict=True)
    }
    points = int(np.prod([len(values) for values in axes.values()]))
    if points > MAX_GRID_POINTS:
        raise PlanError("grid", points, f"at most {MAX_GRID_POINTS:,} plans")
    for stage in axes["zero_stage"]:
        check_parallelism(replace(plan.parallelism, zero_stage=stage))
    for length in axes["sequence_length"]:
        check_training(plan.model, replace(workload, sequence_length=length), plan.parallelism)
    for world_size in axes["world_size"]:
        check_splits(plan.model, workload, replace(plan.parallelism, world_size=world_size))
    return axes


def _replay_points(
    plan: Plan,
    workload: TrainingWorkload,
    axes: Mapping[str, tuple[int, ...]],
    memory: Mapping[str, NDArray[Any]],
) -> None:
    """Replace a grid's memory by that of each plan's own replay."""
    for place in np.ndindex(*(len(values) for values in axes.values())):
        at = {name: axes[name][index] for name, index in zip(axes, place, strict=True)}
        parallelism = replace(
            plan.parallelism, zero_stage=at.pop("zero_stage"), world_size=at.pop("world_size")
        )
        point = step_memory(plan.model, replace(workload, **at), parallelism, plan.hardware).worst
        memory["allocated_bytes"][place] = point.allocated_bytes
        memory["reserved_bytes"][place] = point.overheads.reserved_bytes
        memory["device_bytes"][place] = point.overheads.device_bytes


def grid(
    plan: Plan,
    *,
    zero_stages: Sequence[int] | None = None,
    world_sizes: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
    sequence_lengths: Sequence[int] | None = None,
    replay: bool = False,
) -> Grid:
    """Evaluate a training plan over four axes by the formulas that answer a single plan.

    An axis not given has the plan's own value. Returns allocated, reserved and device bytes, the
    verdict's state, step time, tokens/s and MFU. The allocator is replayed for the plan itself, and
    its share of segments is taken for all; with `replay` it is replayed for every point, tens of
    milliseconds each, and memory is what a single plan's prediction says. Raises PlanError for a serving plan, a value out of
    range or more than a million plans.
    """
    workload = plan.workload
    if not isinstance(workload, TrainingWorkload):
        raise PlanError("job", str(plan.job), "train, as a grid varies a training plan")
    given = (
        (zero_stages, plan.parallelism.zero_stage),
        (world_sizes, plan.parallelism.world_size),
        (micro_batches, workload.micro_batch),
        (sequence_lengths, workload.sequence_length),
    )
    lists = [(own,) if values is None else values for values, own in given]
    axes = _checked_axes(plan, workload, lists)
    memory = step_grid(
        plan.model,
        workload,
        plan.parallelism,
        zero_stages=axes["zero_stage"],
        world_sizes=axes["world_size"],
        micro_batches=axes["micro_batch"],
        sequence_lengths=axes["sequence_length"],
        hardware=plan.hardware,
        segment_share=step_segment_share(plan.model, workload, plan.parallelism, plan.hardware),
    )
    if replay:
        _replay_points(plan, workload, axes, memory)
    speed = training_speed_grid(
        plan.model,
        workload,
        plan.parallelism,
        plan.hardware,
        zero_stages=axes["zero_stage"],
        world_sizes=axes["world_size"],
        micro_batches=axes["micro_batch"],
        sequence_lengths=axes["sequence_length"],
    )
    states = verdicts(plan, workload, axes, memory["device_bytes"])
    return Grid(axes=axes, values={**memory, "verdict": states, **speed})


def verdicts(
    plan: Plan, workload: TrainingWorkload, axes: Mapping[str, Sequence[int]], device: NDArray[Any]
) -> NDArray[np.str_]:
    """Return the verdict on device bytes over stage, ranks, micro-batch and length.

    Each is from the history of the plan's engine at its stage; `axes` names stages and ranks.
    """
    engine, capacity_bytes = plan.parallelism.engine, plan.hardware.visible_bytes
    ratios = ratios_by_stage(plan_traits(plan, workload), axes["zero_stage"])
    if ratios is None or is_split(plan.parallelism):
        return judge_grid(device, capacity_bytes)
    ranks = np.array(axes["world_size"], dtype=np.int64)[:, None, None]
    doubt = outside_bytes(workload, engine, ranks, plan.hardware).doubt_bytes
    low, high = (bounds[:, None, None, None] for bounds in ratios)
    return judge_grid(device, capacity_bytes, device * low - doubt, device * high + doubt)
