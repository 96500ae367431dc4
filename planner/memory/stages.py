"""Memory of a plan that splits the model over GPUs: that of the GPU that holds the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.hardware import Gpu
from planner.memory import ledger
from planner.memory.beside import Beside, compute_itemsize, one_stage_beside
from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.parallel import (
    group_size,
    in_flight,
    is_split,
    rank_workload,
    stage_specs,
)
from planner.memory.training import (
    BesideAt,
    TrainingMemory,
    plan_segment_share,
    template_key,
    training_grid,
    training_memory,
)
from planner.model import ModelSpec
from planner.rank import RankSpec
from planner.units import format_bytes
from planner.workload import Parallelism, TrainingWorkload

NOT_PROVEN = (
    "Planned, not proven: no run of ours has split a model over GPUs, so nothing measured stands "
    "behind this part of the prediction."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """A predicted step of every pipeline stage; a plan without a pipeline has one.

    `unbalanced` is the worst stage if all tokens went to one rank's experts.
    """

    stages: tuple[TrainingMemory, ...]
    parts: tuple[ModelSpec, ...]
    in_flight: tuple[int, ...]
    unbalanced: TrainingMemory | None

    @property
    def worst_stage(self) -> int:
        """The index of the stage that needs the most."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].allocated_bytes)

    @property
    def worst(self) -> TrainingMemory:
        """The step of the stage that needs the most."""
        return self.stages[self.worst_stage]

    def to_dict(self) -> dict[str, Any]:
        """Return the `memory` object of a prediction: the worst stage's, and all stages' peaks."""
        data = self.worst.to_dict()
        return data if len(self.stages) == 1 else {**data, "stages": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        first = 0
        for memory, part, flying in zip(self.stages, self.parts, self.in_flight, strict=True):
            row = {
                "first_layer": first,
                "layers": part.num_layers,
                "micro_batches_in_flight": flying,
                "allocated_bytes": memory.allocated_bytes,
                "peak_phase": memory.peak_phase,
            }
            rows.append(row)
            first += part.num_layers
        return rows

    def notes(self) -> tuple[str, ...]:
        """Say of a split model that nothing was proven, which stage is worst, what routing adds."""
        if not isinstance(self.parts[0], RankSpec):
            return ()
        return (NOT_PROVEN, *self._stage_note(), *self._routing_note())

    def _stage_note(self) -> tuple[str, ...]:
        if len(self.stages) == 1:
            return ()
        row = self._rows()[self.worst_stage]
        last = row["first_layer"] + row["layers"] - 1
        least = min(memory.allocated_bytes for memory in self.stages)
        return (
            f"Pipeline stage {self.worst_stage + 1} of {len(self.stages)} needs the most: layers "
            f"{row['first_layer']} to {last}, micro-batches in flight: "
            f"{row['micro_batches_in_flight']}, {format_bytes(row['allocated_bytes'])} allocated; "
            f"the least that a stage allocates is {format_bytes(least)}.",
        )

    def _routing_note(self) -> tuple[str, ...]:
        if self.unbalanced is None:
            return ()
        return (
            "Routing is taken as balanced; if every token went to the experts of one rank, that "
            f"rank would allocate {format_bytes(self.unbalanced.allocated_bytes)}.",
        )


def step_memory(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None = None,
    segment_share: float | None = None,
) -> StepMemory:
    """Predict a step of every pipeline stage; see `training_memory`.

    The allocator is replayed unless a pipeline splits the model: then a step has other sections
    than were traced, and segments are a share of the allocated peak.
    """
    parts = stage_specs(spec, parallelism)
    flying = tuple(in_flight(workload, parallelism, stage) for stage in range(len(parts)))
    found: dict[tuple[ModelSpec, int], TrainingMemory] = {}

    def one_stage(part: ModelSpec, count: int) -> TrainingMemory:
        own = rank_workload(workload, parallelism)
        if not is_split(parallelism):
            return training_memory(part, own, parallelism, hardware, segment_share)
        key = template_key(part, own, own.sequence_length)
        beside = _beside(part, own, parallelism, count)(key, own.micro_batch, own.sequence_length)
        return training_memory(part, own, parallelism, hardware, segment_share, beside)

    for pair in zip(parts, flying, strict=True):
        if pair not in found:
            found[pair] = one_stage(*pair)
    stages = tuple(found[pair] for pair in zip(parts, flying, strict=True))
    balanced = StepMemory(stages=stages, parts=parts, in_flight=flying, unbalanced=None)
    if parallelism.expert_parallel == 1:
        return balanced
    worst = balanced.worst_stage
    crowded = _all_tokens_to_one_rank(parts[worst], parallelism)
    return replace(balanced, unbalanced=one_stage(crowded, flying[worst]))


def step_segment_share(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None = None,
) -> float:
    """What a plan reserves beyond the formulas' allocated peak, as a share of that peak."""
    if parallelism.pipeline_parallel > 1:
        return TYPICAL_SEGMENT_SHARE
    (part,) = stage_specs(spec, parallelism)
    own = rank_workload(workload, parallelism)
    beside = one_stage_beside(part, own, parallelism) if is_split(parallelism) else None
    return plan_segment_share(part, own, parallelism, hardware, beside)


def step_grid(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    *,
    zero_stages: Sequence[int],
    world_sizes: Sequence[int],
    micro_batches: Sequence[int],
    sequence_lengths: Sequence[int],
    hardware: Gpu | None = None,
    segment_share: float = TYPICAL_SEGMENT_SHARE,
) -> dict[str, npt.NDArray[np.int64]]:
    """Predict a grid of plans, each by its worst pipeline stage; see `training_grid`."""
    worst: dict[str, npt.NDArray[np.int64]] = {}
    for stage, part in enumerate(stage_specs(spec, parallelism)):
        own = rank_workload(workload, parallelism)
        flying = in_flight(workload, parallelism, stage)
        found = training_grid(
            part,
            own,
            parallelism.engine,
            *(zero_stages, world_sizes, micro_batches),
            [length // parallelism.context_parallel for length in sequence_lengths],
            hardware,
            segment_share,
            gpus_per_rank=group_size(parallelism),
            beside_at=_beside(part, own, parallelism, flying) if is_split(parallelism) else None,
        )
        worst = {name: np.maximum(worst.get(name, 0), values) for name, values in found.items()}
    return worst


def _beside(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, flying: int
) -> BesideAt:
    """What is beside a stage's part of a model, for a template's key, batch and length."""

    def beside_at(key: str, micro_batch: Any, sequence_length: Any) -> Beside:
        kept = ledger.kept_parts(part, key, micro_batch, sequence_length) if flying > 1 else {}
        return Beside(
            spec=part,
            parallelism=parallelism,
            itemsize=compute_itemsize(workload.precision),
            tokens=micro_batch * sequence_length,
            num_others=flying - 1,
            others={name: (flying - 1) * size for name, size in kept.items()},
        )

    return beside_at


def _all_tokens_to_one_rank(part: ModelSpec, parallelism: Parallelism) -> ModelSpec:
    """The part whose experts are visited by all tokens of the ranks that split them."""
    own_experts = part.num_experts // parallelism.expert_parallel
    visits = parallelism.expert_parallel * min(part.experts_per_token, own_experts)
    return replace(part, experts_per_token=visits)
