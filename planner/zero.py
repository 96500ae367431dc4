"""What each ZeRO stage and engine holds, sends and saves for a plan, and when that is not the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from planner.checks import canonical_json
from planner.communication import RING_PASSES
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.memory.ideal import ideal_bytes
from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.parallel import stage_specs
from planner.memory.stages import step_memory
from planner.memory.training import TrainingMemory, whole_parts
from planner.obstacles import check_training
from planner.payloads import step_payloads
from planner.plan import Plan
from planner.verdict import judge
from planner.workload import (
    Checkpointing,
    Engine,
    Loss,
    Parallelism,
    TrainingWorkload,
    flat_dict,
)

STAGES = (0, 1, 2, 3)
# Everything of a peak under the names that the table has; what is not named is "other".
PARTS = (
    *("parameters", "gradients", "optimizer", "gathered"),
    *("activations", "attention", "logits", "other"),
)
# What ZeRO shards or gathers, and what it leaves whole on every rank.
STATE_PARTS, MODEL_PARTS = PARTS[:4], ("activations", "attention", "logits", "temporary")
# From this share of the peak on, what ZeRO does not touch is most of it.
DOMINATED_SHARE = 0.5


class Sent(NamedTuple):
    """One kind of collective in a step: full buffers, what a rank sends of them, and how long."""

    collective: str
    calls: int
    payload_bytes: int
    sent_bytes: float
    time_s: float


class Links(NamedTuple):
    """Bytes per second and GPU in each direction, within a node and between nodes."""

    in_node_bytes_s: float
    network_bytes_s: float
    gpus_per_node: int = 8

    def slowest_bytes_s(self, gpus: int) -> float:
        """The slowest link of a ring over `gpus`."""
        if gpus <= self.gpus_per_node:
            return self.in_node_bytes_s
        return min(self.in_node_bytes_s, self.network_bytes_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRow:
    """A stage of an engine at one world size: predicted bytes of rank 0, and what a step sends.

    `parts` sum to `allocated_bytes`. `ideal_bytes` is None for a split model.
    """

    engine: Engine
    zero_stage: int
    world_size: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    verdict: str
    peak_phase: str
    parts: Mapping[str, int]
    ideal_bytes: int | None
    sent: tuple[Sent, ...]

    @property
    def distance_percent(self) -> float | None:
        """How far the peak is above the least that the stage can hold."""
        if self.ideal_bytes is None:
            return None
        return 100 * (self.allocated_bytes - self.ideal_bytes) / self.ideal_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return one plain line of the table; collectives are summed."""
        return {
            "engine": str(self.engine),
            "zero_stage": self.zero_stage,
            "world_size": self.world_size,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "verdict": self.verdict,
            "peak_phase": self.peak_phase,
            "parts": dict(self.parts),
            "ideal_bytes": self.ideal_bytes,
            "distance_percent": self.distance_percent,
            "sent": [one._asdict() for one in self.sent],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTable:
    """Rows for what can be planned, and for each engine that cannot be, the sentence why."""

    rows: tuple[ZeroRow, ...]
    refused: Mapping[Engine, str]


class Lever(NamedTuple):
    """A change of the workload, in words, and the peak it leaves."""

    change: str
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What no stage takes away: parts of a peak that ZeRO shards, and that it leaves alone.

    `levers` say what would lower the peak instead, most first; empty where states are most of it.
    """

    engine: Engine
    zero_stage: int
    allocated_bytes: int
    state_bytes: int
    model_bytes: int
    levers: tuple[Lever, ...]

    @property
    def model_share(self) -> float:
        """Share of the peak that activations, attention, logits and temporaries are."""
        return self.model_bytes / self.allocated_bytes

    @property
    def is_dominated(self) -> bool:
        """Whether ZeRO has little left to save."""
        return self.model_share > DOMINATED_SHARE


def plan_links(gpu: Gpu, in_node_bytes_s: float, network_bytes_s: float) -> Links:
    """Return the links of a plan whose nodes are those of `gpu`."""
    return Links(in_node_bytes_s, network_bytes_s, gpu.gpus_per_node)


def zero_table(
    plan: Plan,
    *,
    engines: Iterable[Engine],
    stages: Iterable[int],
    world_sizes: Sequence[int],
    links: Links,
) -> ZeroTable:
    """Predict every stage of every engine at every world size, all else as in `plan`.

    Each row replays the allocator (tens of milliseconds). Stages that an engine lacks have no row.
    Raises PlanError for a serving plan.
    """
    workload = training(plan)
    wanted = tuple(stages)
    rows: list[ZeroRow] = []
    refused: dict[Engine, str] = {}
    for engine in engines:
        for stage, world_size in [(s, n) for s in wanted for n in world_sizes]:
            parallelism = replace(
                plan.parallelism, engine=engine, zero_stage=stage, world_size=world_size
            )
            try:
                check_training(plan.model, workload, parallelism)
                rows.append(zero_row(plan, workload, parallelism, links))
            except PlanError as problem:
                if problem.field != "parallelism.zero_stage":
                    refused.setdefault(engine, str(problem))
    return ZeroTable(rows=tuple(rows), refused=refused)


def training(plan: Plan) -> TrainingWorkload:
    """Return the workload of a training plan; raises PlanError for a serving one."""
    if isinstance(plan.workload, TrainingWorkload):
        return plan.workload
    raise PlanError("job", str(plan.job), "train, as ZeRO shards the state of training")


def zero_row(
    plan: Plan, workload: TrainingWorkload, parallelism: Parallelism, links: Links
) -> ZeroRow:
    """Predict one stage of one engine at one world size."""
    memory = step_memory(plan.model, workload, parallelism, plan.hardware).worst
    device_bytes = memory.overheads.device_bytes
    return ZeroRow(
        engine=parallelism.engine,
        zero_stage=parallelism.zero_stage,
        world_size=parallelism.world_size,
        allocated_bytes=memory.allocated_bytes,
        reserved_bytes=memory.overheads.reserved_bytes,
        device_bytes=device_bytes,
        verdict=str(judge(device_bytes, plan.hardware.visible_bytes).state),
        peak_phase=memory.peak_phase,
        parts=named_parts(memory),
        ideal_bytes=ideal_bytes(plan.model, workload, parallelism, plan.hardware),
        sent=sent_in_step(plan, workload, parallelism, links),
    )


def named_parts(memory: TrainingMemory) -> dict[str, int]:
    """Return the bytes of a peak by the names of `PARTS`."""
    found = whole_parts(memory.peak)
    named = {name: found.get(name, 0) for name in PARTS[:-1]}
    return {**named, "other": sum(found.values()) - sum(named.values())}


def sent_in_step(
    plan: Plan, workload: TrainingWorkload, parallelism: Parallelism, links: Links
) -> tuple[Sent, ...]:
    """Return the collectives of a step over the data-parallel ranks and their time in a ring.

    Time is bytes over the slowest link; nothing is taken off for what overlaps with computing.
    """
    ranks = parallelism.world_size
    # Of a split model every GPU shares the state of its own part.
    part = stage_specs(plan.model, parallelism)[0]
    found = step_payloads(part, workload, parallelism.engine, parallelism.zero_stage, ranks)
    rate = links.slowest_bytes_s(ranks)
    sent = []
    for name, payload_bytes, calls in found:
        size_bytes = RING_PASSES.get(name, 1) * int(payload_bytes) * (ranks - 1) / ranks
        sent.append(Sent(name, int(calls), int(payload_bytes), size_bytes, size_bytes / rate))
    return tuple(sent)


def work_of(document: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what a stored training plan computes, as a key, and how it is spread.

    Plans of one key differ in engine, stage and ranks alone. Nothing is checked: a table of
    hundreds of stored plans is sorted without tracing their models.
    """
    workload = {**flat_dict(TrainingWorkload()), **document.get("workload", {})}
    spread = {**flat_dict(Parallelism()), **document.get("parallelism", {})}
    split = {name: spread[name] for name in spread if name not in _SPREAD}
    work = [document.get("job", "train"), document["model"], workload, split]
    return canonical_json("work", work), {name: spread[name] for name in _SPREAD}


_SPREAD = ("engine", "zero_stage", "world_size")


def stage_savings(rows: Sequence[ZeroRow]) -> list[tuple[ZeroRow, ZeroRow]]:
    """Pair each row with that of the stage below: same engine, same world size."""
    by_stage = {(row.engine, row.world_size, row.zero_stage): row for row in rows}
    pairs = []
    for (engine, world_size, stage), row in sorted(by_stage.items()):
        below = by_stage.get((engine, world_size, stage - 1))
        if below is not None:
            pairs.append((below, row))
    return pairs


def remainder(plan: Plan) -> Remainder:
    """Say what is left of the peak at the plan's highest stage, and what would lower it instead."""
    workload = training(plan)
    parallelism = replace(plan.parallelism, zero_stage=3)
    try:
        check_training(plan.model, workload, parallelism)
    except PlanError:
        parallelism = plan.parallelism
    memory = step_memory(plan.model, workload, parallelism, plan.hardware).worst
    parts = whole_parts(memory.peak)
    found = Remainder(
        engine=parallelism.engine,
        zero_stage=parallelism.zero_stage,
        allocated_bytes=memory.allocated_bytes,
        state_bytes=sum(parts.get(name, 0) for name in STATE_PARTS),
        model_bytes=sum(parts.get(name, 0) for name in MODEL_PARTS),
        levers=(),
    )
    if not found.is_dominated:
        return found
    return replace(found, levers=tuple(_levers(plan, workload, parallelism, memory)))


def _levers(
    plan: Plan, workload: TrainingWorkload, parallelism: Parallelism, memory: TrainingMemory
) -> list[Lever]:
    found = []
    for words, changed in _changes(workload):
        with suppress(PlanError):
            check_training(plan.model, changed, parallelism)
            spared = step_memory(
                plan.model, changed, parallelism, plan.hardware, TYPICAL_SEGMENT_SHARE
            )
            found.append(Lever(words, spared.worst.allocated_bytes))
    lower = [lever for lever in found if lever.allocated_bytes < 0.99 * memory.allocated_bytes]
    return sorted(lower, key=lambda lever: lever.allocated_bytes)


def _changes(workload: TrainingWorkload) -> list[tuple[str, TrainingWorkload]]:
    """Single changes of what a step computes at once."""
    changes = []
    if workload.checkpointing is not Checkpointing.FULL:
        full = replace(workload, checkpointing=Checkpointing.FULL)
        changes.append(("full checkpointing", full))
    if workload.loss is Loss.HF:
        changes.append(("a chunked loss", replace(workload, loss=Loss.CHUNKED)))
    if workload.micro_batch > 1:
        fewer = workload.micro_batch // 2
        half = replace(
            workload, micro_batch=fewer, grad_accumulation=2 * workload.grad_accumulation
        )
        changes.append((f"micro-batch {fewer} and twice the accumulation", half))
    shorter = workload.sequence_length // 2
    if shorter:
        words = f"sequences of {shorter:,} tokens"
        changes.append((words, replace(workload, sequence_length=shorter)))
    return changes
