"""Memory of a plan that splits the model over GPUs: that of the GPU that holds the most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.hardware import Gpu
from planner.memory import ledger
from planner.memory.beside import Beside, compute_itemsize
from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.parallel import (
    group_size,
    in_flight,
    is_split,
    rank_workload,
    stage_specs,
    state_sharing,
)
from planner.memory.templates import Traced, traced
from planner.memory.training import (
    BesideAt,
    TrainingMemory,
    plan_segment_share,
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

    `worst_stage` is the index of the one that needs the most, `unbalanced` that stage if all tokens
    went to one rank's experts.
    """

    stages: tuple[TrainingMemory, ...]
    parts: tuple[ModelSpec, ...]
    in_flight: tuple[int, ...]
    worst_stage: int
    unbalanced: TrainingMemory | None

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

    Of several stages the allocator is replayed for the worst one only.
    """
    parts = stage_specs(spec, parallelism)
    flying = tuple(in_flight(workload, parallelism, stage) for stage in range(len(parts)))
    plan = rank_workload(workload, parallelism), parallelism, hardware
    first_share = TYPICAL_SEGMENT_SHARE if len(parts) > 1 else segment_share
    found = {
        (part, count): _stage_memory(part, count, *plan, first_share)
        for part, count in dict.fromkeys(zip(parts, flying, strict=True))
    }
    stages = [found[pair] for pair in zip(parts, flying, strict=True)]
    worst = max(range(len(stages)), key=lambda stage: stages[stage].allocated_bytes)
    if first_share != segment_share:
        stages[worst] = _stage_memory(parts[worst], flying[worst], *plan, segment_share)
    unbalanced = None
    if parallelism.expert_parallel > 1:
        crowded = _all_tokens_to_one_rank(parts[worst], parallelism)
        unbalanced = _stage_memory(crowded, flying[worst], *plan, TYPICAL_SEGMENT_SHARE)
    return StepMemory(
        stages=tuple(stages),
        parts=parts,
        in_flight=flying,
        worst_stage=worst,
        unbalanced=unbalanced,
    )


def _stage_memory(
    part: ModelSpec,
    flying: int,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None,
    segment_share: float | None,
) -> TrainingMemory:
    """Predict the step of one GPU; `workload` is its own."""
    plan = part, workload, state_sharing(parallelism), hardware
    if not is_split(parallelism):
        return training_memory(*plan, segment_share)
    key = traced(part, workload, workload.sequence_length)
    sizes = key, workload.micro_batch, workload.sequence_length
    cases = [beside_at(*sizes) for beside_at in _cases(part, workload, parallelism, flying)]
    if len(cases) > 1:
        cases.sort(key=lambda beside: _summed_bytes(*plan, beside))
    return training_memory(*plan, segment_share, cases[-1], flying)


def step_segment_share(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None = None,
) -> float:
    """What a plan reserves beyond the formulas' allocated peak, as a share of that peak."""
    if not is_split(parallelism):
        return plan_segment_share(spec, workload, parallelism, hardware)
    plan = spec, workload, parallelism, hardware
    replayed, summed = step_memory(*plan).worst, step_memory(*plan, TYPICAL_SEGMENT_SHARE).worst
    return float(replayed.overheads.reserved_bytes / summed.allocated_bytes - 1)


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
    own, context = rank_workload(workload, parallelism), parallelism.context_parallel
    for stage, part in enumerate(stage_specs(spec, parallelism)):
        flying = in_flight(workload, parallelism, stage)
        for beside_at in _cases(part, own, parallelism, flying):
            found = training_grid(
                part,
                own,
                parallelism.engine,
                zero_stages,
                [ranks * context for ranks in world_sizes],
                micro_batches,
                [length // context for length in sequence_lengths],
                hardware,
                segment_share,
                gpus_per_rank=group_size(parallelism) // context,
                beside_at=beside_at if is_split(parallelism) else None,
            )
            worst = {name: np.maximum(worst.get(name, 0), sizes) for name, sizes in found.items()}
    return worst


def _summed_bytes(
    part: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None,
    beside: Beside,
) -> int:
    plan = part, workload, parallelism, hardware
    return training_memory(*plan, TYPICAL_SEGMENT_SHARE, beside).allocated_bytes


def _cases(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, flying: int
) -> list[BesideAt]:
    """What can be beside a stage's part of a model as its step is highest.

    With more micro-batches than are in flight, all others in flight and gradients of earlier ones.
    With as many, either all others and no gradients yet, or gradients and one micro-batch less.
    """
    most = _beside(part, workload, parallelism, flying - 1, workload.grad_accumulation > flying)
    if workload.grad_accumulation > flying or flying == 1:
        return [most]
    return [most, _beside(part, workload, parallelism, flying - 2, True)]


def _beside(
    part: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    num_others: int,
    finds_gradients: bool,
) -> BesideAt:
    """What is beside a stage's part of a model, for a template's key, batch and length."""

    def beside_at(key: Traced, micro_batch: Any, sequence_length: Any) -> Beside:
        kept = ledger.kept_parts(part, key, micro_batch, sequence_length) if num_others else {}
        return Beside(
            spec=part,
            parallelism=parallelism,
            itemsize=compute_itemsize(workload.precision),
            tokens=micro_batch * sequence_length,
            num_others=num_others,
            others={name: num_others * size for name, size in kept.items()},
            finds_gradients=finds_gradients,
        )

    return beside_at


def _all_tokens_to_one_rank(part: ModelSpec, parallelism: Parallelism) -> ModelSpec:
    """The part whose experts are visited by all tokens of the ranks that split them."""
    own_experts = part.num_experts // parallelism.expert_parallel
    visits = parallelism.expert_parallel * min(part.experts_per_token, own_experts)
    return replace(part, experts_per_token=visits)
