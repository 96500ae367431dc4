"""Peak memory of a training step: the traced moments plus what the engine holds at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.hardware import Gpu
from planner.memory import ledger
from planner.memory.adapters import trained_groups
from planner.memory.beside import Beside
from planner.memory.ddp import DdpStates
from planner.memory.deepspeed import DeepSpeedStates
from planner.memory.fsdp2 import Fsdp2States
from planner.memory.kinds import SLIDING
from planner.memory.offload import OffloadedStates
from planner.memory.overheads import (
    TYPICAL_SEGMENT_SHARE,
    Outside,
    Overheads,
    outside_bytes,
    workspace_bytes,
)
from planner.memory.parallel import group_size
from planner.memory.recorder import ReplayedOutOfMemoryError
from planner.memory.replay import Replayed
from planner.memory.replay_engines import replay_training
from planner.memory.sections import COMPONENTS
from planner.memory.states import PeakmarkStates
from planner.memory.templates import Traced, load_moments, traced
from planner.memory.timeline import (
    PHASES,
    EngineStates,
    Held,
    Moment,
    Timeline,
    add_parts,
    phase_of,
)
from planner.model import ModelSpec
from planner.workload import (
    Checkpointing,
    Engine,
    Parallelism,
    Precision,
    ReduceDtype,
    TrainingWorkload,
)

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    *COMPONENTS[:-1],
    "workspace",
    "rounding",
)
# What an array of 64-bit integers can hold with the overheads on top; no plan that runs comes near.
_MOST_GRID_BYTES = 2.0**62
# Larger sizes do not fit into the replay's 64-bit integers; it is a million times any GPU.
LARGEST_REPLAYED_BYTES = 2**60
BesideAt = Callable[[Traced, Any, Any], Beside]
_STATES: dict[Engine, Callable[..., EngineStates]] = {
    Engine.PEAKMARK: PeakmarkStates,
    Engine.FSDP2: Fsdp2States,
    Engine.DDP: DdpStates,
    Engine.ZERO_REDUNDANCY: DdpStates,
    Engine.DEEPSPEED: DeepSpeedStates,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """A predicted step: the peak, the highest moment of each phase, the ledger at the peak."""

    peak: Moment
    num_layers: int
    by_phase: dict[str, Moment]
    overheads: Overheads
    entries: tuple[ledger.Entry, ...]
    formulas: dict[str, str]

    @property
    def allocated_bytes(self) -> int:
        """Peak of the bytes in the caching allocator's blocks."""
        return round(self.peak.total_bytes)

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak lies."""
        return phase_of(self.peak.place, self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the `memory` object of a prediction."""
        parts = whole_parts(self.peak)
        return {
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.overheads.reserved_bytes,
            "device_bytes": self.overheads.device_bytes,
            "peak_phase": self.peak_phase,
            "rank": 0,
            "phases": [_phase_row(name, moment) for name, moment in self.by_phase.items()],
            "components": [
                {"name": name, "bytes": parts[name], "formula": self.formulas[name]}
                for name in PARTS
                if parts[name]
            ],
            "overheads": list(self.overheads.rows()),
            "ledger": [entry.to_dict() for entry in self.entries],
        }


def whole_parts(moment: Moment) -> dict[str, int]:
    """Parts as whole bytes that sum to the rounded total; what rounding leaves is temporary."""
    parts = {name: int(moment.parts.get(name, 0)) for name in PARTS}
    parts["temporary"] += round(moment.total_bytes) - sum(parts.values())
    return parts


def _phase_row(name: str, moment: Moment) -> dict[str, Any]:
    return {
        "name": name,
        "label": PHASES[name],
        "allocated_bytes": round(moment.total_bytes),
        "parts": {part: size for part, size in whole_parts(moment).items() if size},
    }


def attention_notes(spec: ModelSpec, workload: TrainingWorkload) -> tuple[str, ...]:
    """Say where the chosen attention keeps more than its name promises."""
    template = traced(spec, workload, workload.sequence_length)
    if workload.packed and template.key.startswith("sdpa"):
        return (
            "Rows of several documents give SDPA a mask: every layer keeps it (sequence squared) and "
            "copies keys and values to all query heads.",
        )
    variant, masked = template.key.split("/")[0], sum(SLIDING in kind for kind in template.kinds)
    if variant.startswith("sdpa") and masked:
        every = "every layer" if masked == spec.num_layers else f"each of {masked} layers"
        return (
            f"From {spec.sliding_window:,} tokens on the sliding window gives SDPA a mask: {every} "
            "keeps it (sequence squared) and copies keys and values to all query heads.",
        )
    if spec.family == "falcon" and variant.startswith("sdpa"):
        return (
            "transformers' Falcon gives SDPA a mask and a single key-value head, for which no fused "
            "kernel exists: every layer keeps the scores in fp32, twice what eager attention keeps.",
        )
    grouped = spec.num_heads != spec.num_kv_heads
    if variant == "sdpa" and workload.precision is Precision.FP32 and grouped:
        return (
            "In fp32, SDPA has no fused kernel for grouped key-value heads: every layer keeps the "
            "scores, as eager attention does. The triton kernel does not.",
        )
    return ()


def routing_notes(spec: ModelSpec) -> tuple[str, ...]:
    """Say what of a mixture of experts depends on how tokens are routed."""
    if not spec.num_experts:
        return ()
    return (
        f"Experts hold tokens x {spec.experts_per_token} rows however tokens are routed: an "
        "unbalanced router costs time, not memory, unless experts are split over GPUs.",
    )


def _states(
    spec: ModelSpec,
    workload: TrainingWorkload,
    engine: Engine,
    stage: int,
    world_size: Any,
    beside: Beside | None = None,
) -> EngineStates:
    kind = OffloadedStates if workload.offload_optimizer else _STATES[engine]
    chosen = workload.reduce_dtype
    return kind(
        spec,
        workload.precision,
        workload.optimizer,
        stage,
        world_size,
        accumulates=beside.finds_gradients if beside else workload.grad_accumulation > 1,
        **({} if workload.sync_each_micro_batch else {"syncs": False}),
        **({"trained": trained} if (trained := trained_groups(spec, workload)) else {}),
        **({"recomputes": True} if _recomputes(engine, workload) else {}),
        **({} if chosen is ReduceDtype.AUTO else {"reduce_dtype": chosen}),
    )


def _recomputes(engine: Engine, workload: TrainingWorkload) -> bool:
    """Whether the engine fetches parameters once more for a recomputed forward."""
    return engine is Engine.DEEPSPEED and workload.checkpointing is Checkpointing.FULL


@lru_cache(maxsize=256)
def _held(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    beside: Beside | None = None,
) -> Held:
    """What a plan's engine holds; without anything beside it, whatever the rows and their length."""
    stage, ranks = parallelism.zero_stage, parallelism.world_size
    states = _states(spec, workload, parallelism.engine, stage, ranks, beside)
    moments = load_moments(template, states.gradients)
    return Held(spec, moments, states, beside.parts if beside else None)


def training_memory(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None = None,
    segment_share: float | None = None,
    beside: Beside | None = None,
    flying: int = 1,
) -> TrainingMemory:
    """Predict the peak memory of a steady training step on rank 0, which holds the most.

    The caching allocator is replayed over the step's tensors, unless
    `segment_share` says how much of the allocated peak its segments hold beside tensors,
    or the peak is from `LARGEST_REPLAYED_BYTES` on. `hardware` decides the size of library workspaces; without it Hopper's.
    `beside` and `flying`: what is beside a split model's tensors, and its micro-batches in flight.
    """
    template = traced(spec, workload, workload.sequence_length)
    held = _held(spec, workload.of_any_size(), parallelism, template)
    if beside is not None:
        held = _held.__wrapped__(spec, workload, parallelism, template, beside)
    sizes = workload.micro_batch, workload.sequence_length, workload.lora_rank
    timeline = Timeline(spec, held, *sizes)
    by_phase = {
        name: Moment(moment.place, {**moment.parts, "workspace": workspace_bytes(hardware)})
        for name, moment in timeline.highest().items()
    }
    peak = max(by_phase.values(), key=lambda moment: moment.total_bytes)
    gpus = parallelism.world_size * group_size(parallelism)
    outside = outside_bytes(workload, parallelism.engine, gpus, hardware)
    if segment_share is None and peak.total_bytes < LARGEST_REPLAYED_BYTES:
        replayed = _replay(spec, workload, parallelism, template, hardware, outside, flying)
        formula_peak, peak = peak, _rounded_to_blocks(peak, replayed.allocated_bytes)
        by_phase = {
            name: peak if moment is formula_peak else _no_higher(moment, peak)
            for name, moment in by_phase.items()
        }
        over = Overheads.replayed(round(peak.total_bytes), replayed, outside)
    else:
        share = TYPICAL_SEGMENT_SHARE if segment_share is None else segment_share
        over = Overheads.estimated(round(peak.total_bytes), outside, share)
    return TrainingMemory(
        peak=peak,
        num_layers=spec.num_layers,
        by_phase=by_phase,
        overheads=over,
        entries=ledger.entries(
            *(spec, workload, parallelism, held.states, peak, template),
            others=beside.entries(peak.place) if beside else (),
        ),
        formulas=ledger.formulas(spec, workload, parallelism, peak),
    )


def _replay(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    hardware: Gpu | None,
    outside: Outside,
    flying: int,
) -> Replayed:
    """Replay within the GPU's memory; where that is too small, without an end, to say by how much."""
    plan = (spec, workload, parallelism, template, hardware)
    if hardware is not None:
        held = outside.context_bytes + outside.nccl_bytes
        with suppress(ReplayedOutOfMemoryError):
            capacity_bytes = max(0, hardware.visible_bytes - held)
            return replay_training(*plan, capacity_bytes, flying)
    return replay_training(*plan, flying=flying)


def _rounded_to_blocks(peak: Moment, allocated_bytes: int) -> Moment:
    """The peak as the allocator counts it: whole blocks, some a little larger than their tensor."""
    more = allocated_bytes - round(peak.total_bytes)
    # Where the formulas add what does not quite coincide, the replay says so: less is temporary.
    return Moment(
        peak.place, add_parts(peak.parts, {"rounding" if more > 0 else "temporary": more})
    )


def _no_higher(moment: Moment, peak: Moment) -> Moment:
    """A phase's moment, lowered where the replay found the step's peak to be lower."""
    if round(moment.total_bytes) <= round(peak.total_bytes):
        return moment
    return _rounded_to_blocks(moment, round(peak.total_bytes))


def plan_segment_share(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None = None,
) -> float:
    """What a plan's replay reserves beyond the formulas' allocated peak, as a share of that peak.

    With it, `training_grid` reserves for the plan itself what its replay does.
    """
    plan = (spec, workload, parallelism, hardware)
    replayed = training_memory(*plan)
    formulas = training_memory(*plan, TYPICAL_SEGMENT_SHARE)
    return float(replayed.overheads.reserved_bytes / formulas.allocated_bytes - 1)


def training_grid(
    spec: ModelSpec,
    workload: TrainingWorkload,
    engine: Engine,
    zero_stages: Sequence[int],
    world_sizes: Sequence[int],
    micro_batches: Sequence[int],
    sequence_lengths: Sequence[int],
    hardware: Gpu | None = None,
    segment_share: float = TYPICAL_SEGMENT_SHARE,
    gpus_per_rank: int = 1,
    beside_at: BesideAt | None = None,
) -> dict[str, npt.NDArray[np.int64]]:
    """Predict a grid of plans; each array has the axes stage, world size, batch, sequence.

    Segments are `segment_share` of the allocated peak: the allocator is not replayed here.
    `beside_at` gives, for a template's key, batches and lengths, what is beside model and engine.
    """
    shape = (len(zero_stages), len(world_sizes), len(micro_batches), len(sequence_lengths))
    peak = np.zeros(shape)
    worlds = np.array(world_sizes, dtype=np.int64)[:, None, None]
    batches = np.array(micro_batches, dtype=np.float64)[:, None]
    # Where one row runs other operations than several, a grid is of several.
    rows = replace(workload, micro_batch=max(micro_batches))
    keys = [traced(spec, rows, length) for length in sequence_lengths]
    for key in set(keys):
        columns = [i for i, other in enumerate(keys) if other == key]
        lengths = np.array([sequence_lengths[i] for i in columns], dtype=np.float64)
        for row, stage in enumerate(zero_stages):
            beside = beside_at(key, batches, lengths) if beside_at else None
            states = _states(spec, workload, engine, stage, worlds, beside)
            moments = load_moments(key, states.gradients)
            held = Held(spec, moments, states, beside.parts if beside else None)
            timeline = Timeline(spec, held, batches, lengths, workload.lora_rank)
            peak[row][..., columns] = timeline.peak_bytes()
    allocated_bytes = np.rint(np.minimum(peak, _MOST_GRID_BYTES)).astype(
        np.int64
    ) + workspace_bytes(hardware)
    outside = outside_bytes(workload, engine, worlds * gpus_per_rank, hardware)
    over = Overheads.estimated(allocated_bytes, outside, segment_share)
    return {
        "allocated_bytes": allocated_bytes,
        "reserved_bytes": over.reserved_bytes,
        "device_bytes": over.device_bytes,
    }
