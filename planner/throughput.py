"""How fast a step is: a roofline over its operations plus its communication, uncalibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.communication import Collective, group_collectives, link_notes, step_collectives
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.memory.parallel import group_size, stage_specs
from planner.model import ModelSpec
from planner.offload import host_step
from planner.operations import (
    Cost,
    Numbers,
    element_sizes,
    model_flops,
    muon_flops,
    optimizer_cost,
    training_costs,
)
from planner.rank import RankSpec
from planner.workload import Optimizer, Parallelism, Precision, TrainingWorkload, flat_dict

LABEL = "formula, not calibrated"


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
    """Step time and what follows from it; `mfu` is useful FLOPs over peak FLOPs."""

    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    bound: str
    flops_per_step: float
    operations: tuple[OperationTime, ...]
    communication: tuple[Collective, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form with its label; notes belong to the prediction."""
        data = flat_dict(self)
        del data["notes"]
        data["operations"] = [flat_dict(operation) for operation in self.operations]
        data["communication"] = [flat_dict(item) for item in self.communication]
        return {"label": LABEL, **data}


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


def roofline_s(cost: Cost, peak: float, bandwidth_bytes_s: float) -> Any:
    """Return max(FLOPs / peak, bytes / bandwidth) in seconds."""
    return np.maximum(cost.flops / peak, cost.bytes / bandwidth_bytes_s)


def time_operations(
    costs: Sequence[Cost], peak: float, bandwidth_bytes_s: float
) -> tuple[OperationTime, ...]:
    """Return each cost with its roofline time and whether compute or HBM bounds it."""
    return tuple(
        OperationTime(
            name=cost.name,
            flops=float(cost.flops),
            bytes=float(cost.bytes),
            time_s=float(roofline_s(cost, peak, bandwidth_bytes_s)),
            bound="compute" if cost.flops / peak >= cost.bytes / bandwidth_bytes_s else "hbm",
        )
        for cost in costs
    )


def main_bound(operations: Sequence[OperationTime], communication_s: float) -> str:
    """Return what most of the time goes to: compute, hbm, pipeline or interconnect."""
    spent = {"interconnect": communication_s}
    for operation in operations:
        spent[operation.bound] = spent.get(operation.bound, 0.0) + operation.time_s
    return max(("compute", "hbm", *spent), key=lambda kind: spent.get(kind, 0.0))


def _update_cost(
    spec: ModelSpec, workload: TrainingWorkload, stage: int, world_size: Numbers
) -> Cost:
    local = world_size * 0.0 + spec.parameters
    sizes = element_sizes(workload.precision)
    cost = optimizer_cost(workload, sizes, local / world_size if stage else local)
    if workload.optimizer is not Optimizer.MUON:
        return cost
    return replace(cost, flops=cost.flops + muon_flops(spec))


def _micro_batch_costs(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, b: Numbers, s: Numbers
) -> list[Cost]:
    """Return the costs of all micro-batches on one GPU, for its part of the model.

    Context parallelism gives it every c-th token of each row, with its causal pairs: as fewer rows.
    """
    costs = training_costs(part, workload, b / parallelism.context_parallel, s)
    if not isinstance(part, RankSpec):
        return costs
    return [cost for cost in costs if part.runs(cost.name.split(".")[-1])]


def _bubble(parallelism: Parallelism, workload: TrainingWorkload) -> float:
    """Return the time a pipeline's stage waits, over the time it works: (p - 1) / micro-batches."""
    return (parallelism.pipeline_parallel - 1) / workload.grad_accumulation


def _operations(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu, peak: float
) -> tuple[OperationTime, ...]:
    """Return the operations of one GPU of a pipeline's stage, and how long it waits for others."""
    b, s = float(workload.micro_batch), float(workload.sequence_length)
    sharers = float(parallelism.world_size * parallelism.context_parallel)
    update = _update_cost(part, workload, parallelism.zero_stage, sharers)
    costs = _micro_batch_costs(part, workload, parallelism, b, s)
    worked = time_operations(costs, peak, gpu.mem_bandwidth_bytes_s)
    waited_s = sum(op.time_s for op in worked) * _bubble(parallelism, workload)
    waiting = OperationTime(
        name="pipeline.bubble", flops=0.0, bytes=0.0, time_s=waited_s, bound="pipeline"
    )
    updated = time_operations([update], peak, gpu.mem_bandwidth_bytes_s)
    if workload.offload_optimizer:
        updated = (_host_update(part, workload, parallelism, gpu),)
    return (*worked, *([waiting] if waited_s else []), *updated)


def _host_update(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> OperationTime:
    step = host_step(part, workload, parallelism.world_size, gpu)
    return OperationTime(
        name="optimizer.host",
        flops=0.0,
        bytes=float(step.memory_bytes),
        time_s=float(step.time_s),
        bound=step.bound,
    )


def _communication(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> tuple[Collective, ...]:
    tokens = workload.micro_batch * workload.sequence_length / parallelism.context_parallel
    sent = [
        *step_collectives(part, workload, parallelism, gpu, float(parallelism.world_size)),
        *group_collectives(part, workload, parallelism, gpu, tokens),
    ]
    return tuple(
        Collective(
            collective=item.collective,
            bytes=float(item.bytes),
            count=item.count,
            time_s=float(item.time_s),
        )
        for item in sent
    )


def _stage_step(
    part: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu, peak: float
) -> tuple[float, tuple[OperationTime, ...], tuple[Collective, ...]]:
    operations = _operations(part, workload, parallelism, gpu, peak)
    communication = _communication(part, workload, parallelism, gpu)
    times = (*(op.time_s for op in operations), *(float(item.time_s) for item in communication))
    return sum(times), operations, communication


def training_throughput(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> Throughput:
    """Return the speed of one optimizer step: sum of rooflines plus communication, no overlap.

    A pipeline goes at the pace of its slowest stage, whose operations these are.
    """
    peak, note = peak_flop_s(gpu, compute_dtype(workload.precision))
    gpus = group_size(parallelism)
    step_time_s, operations, communication = max(
        (
            _stage_step(part, workload, parallelism, gpu, peak)
            for part in dict.fromkeys(stage_specs(spec, parallelism))
        ),
        key=lambda step: step[0],
    )
    communication_s = sum(float(item.time_s) for item in communication)
    b, s = float(workload.micro_batch), float(workload.sequence_length)
    tokens = b * s * workload.grad_accumulation
    useful = float(model_flops(spec, b, s)) * workload.grad_accumulation
    return Throughput(
        step_time_s=step_time_s,
        tokens_per_s=tokens * parallelism.world_size / step_time_s,
        tokens_per_s_per_gpu=tokens / (step_time_s * gpus),
        mfu=useful / (step_time_s * peak * gpus),
        bound=main_bound(operations, communication_s),
        flops_per_step=sum(op.flops for op in operations),
        operations=operations,
        communication=communication,
        notes=(*([note] if note else []), *link_notes(gpu, parallelism.world_size * gpus)),
    )


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
    times = []
    for zero_stage in zero_stages:
        at_stage = replace(parallelism, zero_stage=zero_stage)
        slowest: Any = 0.0
        for part in dict.fromkeys(stage_specs(spec, parallelism)):
            taken = _step_times_s(part, workload, at_stage, gpu, peak, (world, b, s))
            slowest = np.maximum(slowest, taken)
        times.append(slowest)
    step_time_s = np.stack(times)
    rounds, gpus = workload.grad_accumulation, group_size(parallelism)
    return {
        "step_time_s": step_time_s,
        "tokens_per_s": b * s * rounds * world / step_time_s,
        "mfu": model_flops(spec, b, s) * rounds / (step_time_s * peak * gpus),
    }


def _step_times_s(
    part: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
    peak: float,
    axes: tuple[Numbers, Numbers, Numbers],
) -> Any:
    """Return the step times of one GPU's part over world size x micro-batch x length."""
    world, b, s = axes
    costs = _micro_batch_costs(part, workload, parallelism, b, s)
    compute = sum(roofline_s(cost, peak, gpu.mem_bandwidth_bytes_s) for cost in costs)
    sharers = world * parallelism.context_parallel
    update = _update_cost(part, workload, parallelism.zero_stage, sharers)
    sent = [
        *step_collectives(part, workload, parallelism, gpu, world),
        *group_collectives(part, workload, parallelism, gpu, b * s / parallelism.context_parallel),
    ]
    updated_s = roofline_s(update, peak, gpu.mem_bandwidth_bytes_s)
    if workload.offload_optimizer:
        updated_s = host_step(part, workload, world, gpu).time_s
    rest = updated_s + sum(c.time_s for c in sent)
    return compute * (1 + _bubble(parallelism, workload)) + rest
