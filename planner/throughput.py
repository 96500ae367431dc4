"""How fast a step is, where its time goes, and how far that is from what the GPU could do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.communication import Collective, group_collectives, link_notes
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.memory.parallel import group_size, stage_specs
from planner.model import ModelSpec
from planner.offload import host_step
from planner.operations import Numbers, model_flops
from planner.speed.calibrated import MEASURED_ID, rates_of
from planner.speed.gpu_time import Part
from planner.speed.rates import Rates
from planner.speed.step import PHASES, Step, micro_batch, training_step
from planner.speed.time_range import TimeRange, range_around
from planner.workload import Parallelism, Precision, TrainingWorkload, flat_dict

LABEL = "formula, not calibrated"
CALIBRATED = "from measured curves"
# What bounds each kind of operation where it runs at the rates that were measured.
_COMPUTE = ("products", "head", "experts", "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """One kind of operation over a whole step on one GPU, and what bounds it."""

    name: str
    flops: float
    bytes: float
    time_s: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Step time and what follows from it; `mfu` is useful FLOPs over peak FLOPs.

    `operations` add up to the step. `hfu` counts what is computed again, too. `ideal_s` is how long the step
    would take at the vendor's peaks; `phases_s` are its phases' times, `gpu_s` and `host_s` what GPU
    and host take for it: the step is no shorter than either. `range_s` is where nine of ten recorded steps like it
    lay. `source` says where rates are from.
    """

    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    bound: str
    flops_per_step: float
    operations: tuple[OperationTime, ...]
    communication: tuple[Collective, ...]
    notes: tuple[str, ...]
    label: str = LABEL
    source: str = "vendor sheet"
    hfu: float | None = None
    ideal_s: float | None = None
    gpu_s: float | None = None
    host_s: float | None = None
    phases_s: Mapping[str, float] | None = None
    range_s: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form with its label; notes belong to the prediction."""
        data = flat_dict(self)
        del data["notes"]
        data["operations"] = [flat_dict(operation) for operation in self.operations]
        data["communication"] = [flat_dict(item) for item in self.communication]
        return data


def peak_flop_s(gpu: Gpu, dtype: str) -> tuple[float, str | None]:
    """Return the peak rate of an element type and a note where another rate stands in.

    A GPU without 16-bit tensor rate computes in fp32. Raises PlanError where that is unknown too.
    """
    rate = gpu.peak_dense_flop_s.get(dtype)
    if rate is not None:
        return rate, None
    fallback = gpu.peak_dense_flop_s.get("fp32")
    if fallback is None:
        field = f"hardware.custom.peak_dense_flop_s.{dtype}"
        sentence = f"{field} is missing: the plan computes in {dtype}."
        raise PlanError(field, None, "a rate", sentence=sentence)
    return fallback, f"{gpu.name} has no {dtype} rate: its fp32 rate is used."


def compute_dtype(precision: Precision) -> str:
    """Return the element type whose peak rate bounds the matrix products."""
    return "fp32" if precision is Precision.FP32 else "bf16"


def main_bound(operations: Sequence[OperationTime], communication_s: float) -> str:
    """Return what most of the time goes to: compute, hbm, pipeline, host or interconnect."""
    spent = {"interconnect": communication_s}
    for operation in operations:
        spent[operation.bound] = spent.get(operation.bound, 0.0) + operation.time_s
    return max(("compute", "hbm", *spent), key=lambda kind: spent.get(kind, 0.0))


def training_throughput(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
) -> Throughput:
    """Return the speed of one optimizer step.

    A pipeline goes at the pace of its slowest stage, whose operations these are.
    """
    peak, note = peak_flop_s(gpu, compute_dtype(workload.precision))
    rates, gpus = rates_of(gpu), group_size(parallelism)
    step, extra = max(
        (
            _stage(part, workload, parallelism, gpu, rates)
            for part in dict.fromkeys(stage_specs(spec, parallelism))
        ),
        key=lambda found: float(found[0].step_time_s) + sum(op.time_s for op in found[1]),
    )
    operations = (*_operations(step), *extra)
    step_time_s = sum(op.time_s for op in operations)
    b, s = float(workload.micro_batch), float(workload.sequence_length)
    tokens = b * s * workload.grad_accumulation
    useful = float(model_flops(spec, b, s)) * workload.grad_accumulation
    flops = sum(op.flops for op in operations)
    spread = _range(step_time_s, step, workload, parallelism, gpu)
    return Throughput(
        step_time_s=step_time_s,
        tokens_per_s=tokens * parallelism.world_size / step_time_s,
        tokens_per_s_per_gpu=tokens / (step_time_s * gpus),
        mfu=useful / (step_time_s * peak * gpus),
        bound=_bound(step, operations),
        flops_per_step=flops,
        operations=operations,
        communication=_communication(step, spec, workload, parallelism, gpu),
        notes=(
            *([note] if note else []),
            *link_notes(gpu, parallelism.world_size * gpus),
            *([spread.sentence()] if spread else []),
        ),
        label=CALIBRATED,
        source=rates.source,
        hfu=flops / (step_time_s * peak),
        ideal_s=_ideal_s(step.parts, peak, gpu.mem_bandwidth_bytes_s),
        gpu_s=float(step.gpu_step_s),
        host_s=float(step.host_step_s),
        phases_s={name: float(step.phase_s(name)) for name in PHASES},
        range_s=(spread.low_s, spread.high_s) if spread else None,
    )


def _range(
    step_time_s: float, step: Step, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> TimeRange | None:
    """Return where the step's time lies; None of what no recorded step of an H200 was like."""
    is_other = gpu.id != MEASURED_ID or gpu.calibration is not None
    if is_other or workload.offload_optimizer or group_size(parallelism) > 1:
        return None
    return range_around(step_time_s, float(step.gpu_step_s), float(step.host_step_s))


def _stage(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu, rates: Rates
) -> tuple[Step, list[OperationTime]]:
    """Return the step of one pipeline stage, and what it takes besides: waits, its group, the host."""
    step = training_step(part, workload, parallelism, rates)
    worked_s = float(step.step_time_s) - float(step.phase_s("optimizer"))
    extra = [_waiting("pipeline.bubble", worked_s * _bubble(parallelism, workload), "pipeline")]
    sent_s = sum(float(c.time_s) for c in _group_sent(part, workload, parallelism, gpu))
    extra.append(_waiting("group.exposed", sent_s, "interconnect"))
    if workload.offload_optimizer:
        offloaded = host_step(part, workload, parallelism.world_size, gpu)
        extra.append(
            OperationTime(
                name="optimizer.host",
                flops=0.0,
                bytes=float(offloaded.memory_bytes),
                time_s=float(offloaded.time_s),
                bound=offloaded.bound,
            )
        )
    return step, [operation for operation in extra if operation.time_s]


def _waiting(name: str, time_s: float, bound: str) -> OperationTime:
    return OperationTime(name=name, flops=0.0, bytes=0.0, time_s=time_s, bound=bound)


def _bubble(parallelism: Parallelism, workload: TrainingWorkload) -> float:
    """Return the time a pipeline's stage waits, over the time it works: (p - 1) / micro-batches."""
    return (parallelism.pipeline_parallel - 1) / workload.grad_accumulation


def _operations(step: Step) -> list[OperationTime]:
    """Return what the step's time goes to: kinds of operations, exposed collectives, the host."""
    merged: dict[tuple[str, str], list[float]] = {}
    for part in step.parts:
        seen = merged.setdefault((part.phase, part.name), [0.0, 0.0, 0.0])
        seen[0] += part.flops
        seen[1] += part.bytes
        seen[2] += part.time_s
    computed = [
        OperationTime(
            name=f"{phase}.{name}",
            flops=float(flops),
            bytes=float(moved),
            time_s=float(time_s),
            bound="compute" if name in _COMPUTE else "hbm",
        )
        for (phase, name), (flops, moved, time_s) in merged.items()
    ]
    exposed = [
        _waiting(f"{name}.collectives", float(step.exposed_s[name]), "interconnect")
        for name in PHASES
    ]
    waited_s = float(step.step_time_s) - float(step.gpu_step_s)
    every = [*computed, *exposed, _waiting("host.waiting", waited_s, "host")]
    return [operation for operation in every if operation.time_s]


def _bound(step: Step, operations: Sequence[OperationTime]) -> str:
    """Return the host where the GPU waits for it, else what most of the GPU's time goes to."""
    if float(step.host_step_s) > float(step.gpu_step_s):
        return "host"
    return main_bound(operations, 0.0)


def _ideal_s(parts: Sequence[Part], peak: float, bandwidth_bytes_s: float) -> float:
    """Return the roofline of all parts: each the longer of FLOPs at the peak and bytes at the sheet's."""
    return sum(
        max(float(part.flops) / peak, float(part.bytes) / bandwidth_bytes_s) for part in parts
    )


def _group_sent(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> list[Collective]:
    tokens = workload.micro_batch * workload.sequence_length / parallelism.context_parallel
    return group_collectives(part, workload, parallelism, gpu, tokens)


def _communication(
    step: Step, spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> tuple[Collective, ...]:
    """Return every collective of the step with its whole time, hidden or not; bytes are those on the wire."""
    sharers = parallelism.world_size * parallelism.context_parallel
    ring = (sharers - 1) / sharers
    own = [
        Collective(
            collective=one.collective,
            bytes=float(one.bytes) * ring * (2 if one.collective == "all_reduce" else 1),
            count=int(one.calls),
            time_s=float(one.time_s),
        )
        for one in step.sent
    ]
    part = next(iter(stage_specs(spec, parallelism)))
    group = [
        replace(one, bytes=float(one.bytes), time_s=float(one.time_s))
        for one in _group_sent(part, workload, parallelism, gpu)
    ]
    return (*own, *group)


def training_speed_grid(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
    *,
    zero_stages: Sequence[int],
    world_sizes: Sequence[int],
    micro_batches: Sequence[int],
    sequence_lengths: Sequence[int],
) -> dict[str, NDArray[np.float64]]:
    """Return step_time_s, tokens_per_s and mfu over stage x world size x micro-batch x length.

    The same formulas as `training_throughput`, evaluated on arrays; `parallelism` says the rest.
    """
    peak, _ = peak_flop_s(gpu, compute_dtype(workload.precision))
    world = np.asarray(world_sizes, dtype=np.float64)[:, None, None]
    b = np.asarray(micro_batches, dtype=np.float64)[:, None]
    s = np.asarray(sequence_lengths, dtype=np.float64)
    shape = np.broadcast_shapes(world.shape, b.shape, s.shape)
    known: dict[ModelSpec, list[Part]] = {}
    times = [
        np.broadcast_to(
            step_times_s(
                spec,
                workload,
                replace(parallelism, zero_stage=zero_stage),
                gpu,
                (world, b, s),
                known,
            ),
            shape,
        )
        for zero_stage in zero_stages
    ]
    step_time_s = np.stack(times)
    rounds, gpus = workload.grad_accumulation, group_size(parallelism)
    return {
        "step_time_s": step_time_s,
        "tokens_per_s": b * s * rounds * world / step_time_s,
        "mfu": model_flops(spec, b, s) * rounds / (step_time_s * peak * gpus),
    }


def step_times_s(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
    axes: tuple[Numbers, Numbers, Numbers],
    known: dict[ModelSpec, list[Part]],
) -> Any:
    """Return the step times over arrays of world sizes, micro-batches and lengths.

    `known` takes up what a micro-batch of each pipeline stage does, for calls with the same micro-batches and
    lengths that differ in engine, stage or accumulation alone.
    """
    slowest: Any = 0.0
    for part in dict.fromkeys(stage_specs(spec, parallelism)):
        if part not in known:
            known[part] = micro_batch(part, workload, parallelism, rates_of(gpu), *axes[1:])
        taken = _part_times_s(part, workload, parallelism, gpu, axes, known[part])
        slowest = np.maximum(slowest, taken)
    return slowest


def _part_times_s(
    part: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
    axes: tuple[Numbers, Numbers, Numbers],
    known: list[Part],
) -> Any:
    """Return the step times of one GPU's part over world size x micro-batch x length."""
    world, b, s = axes
    step = training_step(part, workload, parallelism, rates_of(gpu), axes=axes, known=known)
    worked_s = step.step_time_s - step.phase_s("optimizer")
    tokens = b * s / parallelism.context_parallel
    sent = group_collectives(part, workload, parallelism, gpu, tokens)
    rest = sum(collective.time_s for collective in sent)
    if workload.offload_optimizer:
        rest = rest + host_step(part, workload, world, gpu).time_s
    return step.step_time_s + worked_s * _bubble(parallelism, workload) + rest
