"""Every combination of what a person leaves open, by the formulas that answer a single plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import PlanError
from planner.memory.parallel import group_size
from planner.memory.stages import step_grid, step_segment_share
from planner.model import ModelSpec
from planner.obstacles import check_training
from planner.operations import model_flops
from planner.plan import Plan
from planner.predict import predict
from planner.search import verdicts
from planner.speed.gpu_time import Part
from planner.sweep_axes import SPLITS, Axes, Limits
from planner.throughput import compute_dtype, peak_flop_s, step_times_s
from planner.workload import Attention, Checkpointing, Engine, Parallelism, TrainingWorkload

MAX_COMBINATIONS = 2_000_000
SPREAD = ("engine", "zero_stage", "world_size", *SPLITS)
WORK = ("micro_batch", "grad_accumulation", "sequence_length", "attention", "checkpointing")
SIZES = ("allocated_bytes", "reserved_bytes", "device_bytes")
# Told how many combinations of how many are done.
Progress = Callable[[int, int], None]
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Every planned combination as a row of `columns`, and how many others there are by reason.

    Columns are the choices (`gpus` are all GPUs of the job, `world_size` its data-parallel ranks),
    bytes per GPU, verdict, step_time_s, tokens_per_s, tokens_per_s_per_gpu and mfu. Segments are in
    all the share of the allocated peak that they are in the plan itself, which was replayed.
    """

    plan: Plan
    limits: Limits
    columns: Columns
    not_planned: Mapping[str, int]

    @property
    def planned(self) -> int:
        """Number of combinations that were planned."""
        return int(self.columns["gpus"].size)

    @property
    def combinations(self) -> int:
        """Number of all combinations, planned or not."""
        return self.planned + sum(self.not_planned.values())

    @property
    def is_admissible(self) -> NDArray[np.bool_]:
        """Which rows have the verdict "fits" and leave the margin free."""
        most_bytes = (1 - self.limits.margin) * self.plan.hardware.visible_bytes
        found: NDArray[np.bool_] = (self.columns["device_bytes"] <= most_bytes) & (
            self.columns["verdict"] == "fits"
        )
        return found

    def counts(self) -> dict[str, int]:
        """Return how many combinations ended how; together they are all."""
        states = Counter(self.columns["verdict"].tolist())
        admissible = int(self.is_admissible.sum())
        return {
            "not_planned": sum(self.not_planned.values()),
            "does_not_fit": states["does_not_fit"],
            "tight": states["tight"],
            "too_little_margin": states["fits"] - admissible,
            "admissible": admissible,
        }

    def record(self, row: int) -> dict[str, Any]:
        """Return one row as a plain dictionary."""
        return {name: values[row].item() for name, values in self.columns.items()}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every row as a plain dictionary."""
        names = list(self.columns)
        for row in zip(*(values.tolist() for values in self.columns.values()), strict=True):
            yield dict(zip(names, row, strict=True))

    def plan_at(self, row: int) -> Plan:
        """Return the plan of a row."""
        return plan_with(self.plan, self.record(row))

    def replayed(self) -> Swept:
        """Return the rows with the memory of each plan's own replay, tens of milliseconds each."""
        found = [predict(self.plan_at(row)) for row in range(self.planned)]
        if not found:
            return self
        sizes = {
            name: np.array([one.memory[name] for one in found], dtype=np.int64) for name in SIZES
        }
        states = np.array([str(one.verdict.state) for one in found])
        return replace(self, columns={**self.columns, **sizes, "verdict": states})


def plan_with(plan: Plan, record: Mapping[str, Any]) -> Plan:
    """Return a training plan with the choices of a swept row."""
    assert isinstance(plan.workload, TrainingWorkload)
    kinds = {"engine": Engine, "attention": Attention, "checkpointing": Checkpointing}
    read: dict[str, Any] = {name: kinds.get(name, int)(record[name]) for name in (*SPREAD, *WORK)}
    return replace(
        plan,
        workload=replace(plan.workload, **{name: read[name] for name in WORK}),
        parallelism=replace(plan.parallelism, **{name: read[name] for name in SPREAD}),
    )


def sweep(
    plan: Plan, axes: Axes, limits: Limits | None = None, progress: Progress | None = None
) -> Swept:
    """Predict every combination of `axes`, all else as in `plan`.

    What `progress` raises ends the sweep. Raises PlanError for a serving plan or too many plans.
    """
    workload, limits, size = plan.workload, limits or Limits(), axes.combinations
    if not isinstance(workload, TrainingWorkload):
        raise PlanError("job", str(plan.job), "train, as a sweep varies a training plan")
    if size > MAX_COMBINATIONS:
        raise PlanError("sweep.combinations", size, f"at most {MAX_COMBINATIONS:,}")
    share = step_segment_share(plan.model, workload, plan.parallelism, plan.hardware)
    found = _Found(plan, axes, limits, share)
    outer = list(product(axes.attention, axes.checkpointing, axes.sequence_length))
    splits: list[dict[str, Any]] = [
        dict(zip(SPLITS, sizes, strict=True)) for sizes in product(*axes.splits())
    ]
    for done, ((attention, checkpointing, length), split) in enumerate(product(outer, splits), 1):
        at_these = replace(
            workload, attention=attention, checkpointing=checkpointing, sequence_length=length
        )
        found.add(at_these, replace(plan.parallelism, **split))
        if progress is not None:
            progress(done * size // (len(outer) * len(splits)), size)
    return Swept(plan=plan, limits=limits, columns=found.columns(), not_planned=found.refused)


class _Found:
    """Rows of a sweep as they come: arrays over ranks and micro-batches for all other choices."""

    def __init__(self, plan: Plan, axes: Axes, limits: Limits, segment_share: float) -> None:
        self.plan, self.axes, self.limits = plan, axes, limits
        self.segment_share = segment_share
        self.refused: Counter[str] = Counter()
        self.blocks: list[Columns] = []

    def add(self, workload: TrainingWorkload, split: Parallelism) -> None:
        """Add all engines, stages, GPUs and sizes with this kernel, checkpointing, length and split."""
        worlds = self._worlds(split)
        known: dict[ModelSpec, list[Part]] = {}
        for engine, stage in product(self.axes.engine, self.axes.zero_stage):
            spread = replace(split, engine=engine, zero_stage=stage)
            allowed = self._allowed(workload, spread, worlds)
            if allowed:
                self._add_sizes(workload, spread, np.array(allowed), known)

    def _refuse(self, reason: str, worlds: int) -> None:
        """Count the combinations of some numbers of GPUs, for one engine and stage."""
        sizes = len(self.axes.micro_batch) * max(1, len(self.axes.grad_accumulation))
        self.refused[reason] += worlds * sizes

    def _worlds(self, split: Parallelism) -> list[int]:
        """Return the data-parallel ranks that this split leaves of each number of GPUs."""
        group, most, found = group_size(split), self.limits.max_gpus, []
        spreads = len(self.axes.engine) * len(self.axes.zero_stage)
        for gpus in self.axes.gpus:
            if most is not None and gpus > most:
                self._refuse(f"More than {most:,} GPUs.", spreads)
            elif gpus % group:
                reason = f"Numbers of GPUs that are no multiple of {group:,}, the GPUs of one model copy."
                self._refuse(reason, spreads)
            else:
                found.append(gpus // group)
        return found

    def _allowed(
        self, workload: TrainingWorkload, spread: Parallelism, worlds: list[int]
    ) -> list[int]:
        """Return the ranks with which this can be planned; count the rest by the sentence why."""
        # Of all choices only a split of experts depends on the number of ranks.
        parts = [[world] for world in worlds] if spread.expert_parallel > 1 else [worlds]
        allowed: list[int] = []
        for part in (part for part in parts if part):
            try:
                check_training(self.plan.model, workload, replace(spread, world_size=part[0]))
                allowed += part
            except PlanError as problem:
                self._refuse(str(problem), len(part))
        return allowed

    def _add_sizes(
        self,
        workload: TrainingWorkload,
        spread: Parallelism,
        worlds: NDArray[Any],
        known: dict[ModelSpec, list[Part]],
    ) -> None:
        memory: dict[int, Columns] = {}
        for rounds, wanted in self._rounds(worlds):
            # More micro-batches than are in flight, and one more, hold no more.
            held = min(rounds, spread.pipeline_parallel + 1)
            if held not in memory:
                at_held = replace(workload, grad_accumulation=held)
                memory[held] = self._memory(at_held, spread, worlds)
            at_rounds = replace(workload, grad_accumulation=rounds)
            speed = self._speed(at_rounds, spread, worlds, known)
            self._add_rows(at_rounds, spread, worlds, wanted, {**memory[held], **speed})

    def _rounds(self, worlds: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Yield each accumulation, and with which ranks x micro-batches; count those that have none."""
        each, total = worlds[:, None] * np.array(self.axes.micro_batch), self.limits.global_batch
        given = self.axes.grad_accumulation
        if total is None:
            yield from ((rounds, np.ones(each.shape, bool)) for rounds in given)
            return
        rounds_of = np.where(total % each == 0, total // each, 0)
        wanted = given or tuple(np.unique(rounds_of[rounds_of > 0]).tolist())
        planned = 0
        for rounds in wanted:
            where = rounds_of == rounds
            planned += int(where.sum())
            if where.any():
                yield rounds, where
        reason = f"Ranks x micro-batch x accumulation cannot be {total:,} sequences."
        others = each.size * max(1, len(given)) - planned
        if others:
            self.refused[reason] += others

    def _memory(
        self, workload: TrainingWorkload, spread: Parallelism, worlds: NDArray[Any]
    ) -> Columns:
        found = step_grid(
            self.plan.model,
            workload,
            spread,
            zero_stages=(spread.zero_stage,),
            world_sizes=worlds.tolist(),
            micro_batches=self.axes.micro_batch,
            sequence_lengths=(workload.sequence_length,),
            hardware=self.plan.hardware,
            segment_share=self.segment_share,
        )
        axes = {"zero_stage": (spread.zero_stage,), "world_size": tuple(worlds.tolist())}
        plan = replace(self.plan, workload=workload, parallelism=spread)
        states = verdicts(plan, workload, axes, found["device_bytes"])
        return {name: values[0, :, :, 0] for name, values in {**found, "verdict": states}.items()}

    def _speed(
        self,
        workload: TrainingWorkload,
        spread: Parallelism,
        worlds: NDArray[Any],
        known: dict[ModelSpec, list[Part]],
    ) -> Columns:
        plan, length = self.plan, float(workload.sequence_length)
        peak, _ = peak_flop_s(plan.hardware, compute_dtype(workload.precision))
        rows = np.array(self.axes.micro_batch, dtype=np.float64)
        ranks = worlds.astype(np.float64)[:, None]
        # With a last axis of lengths, of which there is one.
        times = step_times_s(
            plan.model,
            workload,
            spread,
            plan.hardware,
            (ranks[..., None], rows[:, None], np.array([length])),
            known,
        )
        step_time_s = np.broadcast_to(times, (worlds.size, rows.size, 1))[..., 0]
        rounds, group = workload.grad_accumulation, group_size(spread)
        each_s = rows * length * rounds / step_time_s
        flops = model_flops(plan.model, rows, length) * rounds
        return {
            "step_time_s": step_time_s,
            "tokens_per_s": each_s * ranks,
            "tokens_per_s_per_gpu": each_s / group,
            "mfu": flops / (step_time_s * peak * group),
        }

    def _add_rows(
        self,
        workload: TrainingWorkload,
        spread: Parallelism,
        worlds: NDArray[Any],
        wanted: NDArray[np.bool_],
        values: Columns,
    ) -> None:
        at_world, at_batch = np.nonzero(wanted)
        ranks = worlds[at_world]
        same = {name: getattr(spread, name) for name in ("engine", "zero_stage")}
        split = {name: getattr(spread, name) for name in SPLITS}
        of_work = {name: getattr(workload, name) for name in WORK[1:]}
        rows: Columns = {
            **_repeated(same, ranks.size),
            "gpus": ranks * group_size(spread),
            "world_size": ranks,
            **_repeated(split, ranks.size),
            "micro_batch": np.array(self.axes.micro_batch)[at_batch],
            **_repeated(of_work, ranks.size),
        }
        self.blocks.append(rows | {name: v[wanted] for name, v in values.items()})

    def columns(self) -> Columns:
        """Return all rows together."""
        if not self.blocks:
            return {name: np.array([], dtype=kind) for name, kind in _KINDS.items()}
        names = self.blocks[0]
        return {name: np.concatenate([block[name] for block in self.blocks]) for name in names}


_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("engine", "zero_stage", "gpus", "world_size", *SPLITS, *WORK), np.int64),
    **dict.fromkeys(SIZES, np.int64),
    "verdict": np.str_,
    **dict.fromkeys(("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu"), np.float64),
    **dict.fromkeys(("engine", "attention", "checkpointing"), np.str_),
}


def _repeated(values: Mapping[str, Any], times: int) -> Columns:
    plain = {name: v if isinstance(v, int) else str(v) for name, v in values.items()}
    return {name: np.full(times, value) for name, value in plain.items()}
