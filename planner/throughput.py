"""How fast a step is: a roofline over its operations plus its communication, uncalibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.communication import Collective, link_notes, step_collectives
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.operations import (
    Cost,
    Numbers,
    element_sizes,
    model_flops,
    optimizer_cost,
    training_costs,
)
from planner.workload import Engine, Parallelism, Precision, TrainingWorkload, flat_dict

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
    """Return what most of the time goes to: compute, hbm or interconnect."""
    spent = {
        kind: sum(op.time_s for op in operations if op.bound == kind) for kind in ("compute", "hbm")
    }
    spent["interconnect"] = communication_s
    return max(spent, key=lambda kind: spent[kind])


def _update_cost(
    spec: ModelSpec, workload: TrainingWorkload, stage: int, world_size: Numbers
) -> Cost:
    local = world_size * 0.0 + spec.parameters
    sizes = element_sizes(workload.precision)
    return optimizer_cost(workload, sizes, local / world_size if stage else local)


def training_throughput(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, gpu: Gpu
) -> Throughput:
    """Return the speed of one optimizer step: sum of rooflines plus communication, no overlap."""
    peak, note = peak_flop_s(gpu, compute_dtype(workload.precision))
    world_size = float(parallelism.world_size)
    b, s = float(workload.micro_batch), float(workload.sequence_length)
    update = _update_cost(spec, workload, parallelism.zero_stage, world_size)
    costs = [*training_costs(spec, workload, b, s), update]
    operations = time_operations(costs, peak, gpu.mem_bandwidth_bytes_s)
    communication = tuple(
        Collective(
            collective=item.collective,
            bytes=float(item.bytes),
            count=item.count,
            time_s=float(item.time_s),
        )
        for item in step_collectives(spec, workload, parallelism, gpu, world_size)
    )
    communication_s = sum(float(item.time_s) for item in communication)
    step_time_s = sum(op.time_s for op in operations) + communication_s
    tokens = b * s * workload.grad_accumulation
    useful = float(model_flops(spec, b, s)) * workload.grad_accumulation
    return Throughput(
        step_time_s=step_time_s,
        tokens_per_s=tokens * world_size / step_time_s,
        tokens_per_s_per_gpu=tokens / step_time_s,
        mfu=useful / (step_time_s * peak),
        bound=main_bound(operations, communication_s),
        flops_per_step=sum(op.flops for op in operations),
        operations=operations,
        communication=communication,
        notes=(*([note] if note else []), *link_notes(gpu, parallelism.world_size)),
    )


def training_speed_grid(
    spec: ModelSpec,
    workload: TrainingWorkload,
    engine: Engine,
    gpu: Gpu,
    *,
    zero_stages: Sequence[int],
    world_sizes: Sequence[int],
    micro_batches: Sequence[int],
    sequence_lengths: Sequence[int],
) -> dict[str, NDArray[np.float64]]:
    """Return step_time_s, tokens_per_s and mfu over stage x world size x micro-batch x length.

    The same formulas as `training_throughput`, evaluated on arrays.
    """
    peak, _ = peak_flop_s(gpu, compute_dtype(workload.precision))
    world = np.asarray(world_sizes, dtype=np.float64)[:, None, None]
    b = np.asarray(micro_batches, dtype=np.float64)[:, None]
    s = np.asarray(sequence_lengths, dtype=np.float64)
    compute = sum(
        roofline_s(cost, peak, gpu.mem_bandwidth_bytes_s)
        for cost in training_costs(spec, workload, b, s)
    )
    times = []
    for stage in zero_stages:
        parallelism = Parallelism(engine=engine, zero_stage=stage)
        update = _update_cost(spec, workload, stage, world)
        sent = step_collectives(spec, workload, parallelism, gpu, world)
        rest = roofline_s(update, peak, gpu.mem_bandwidth_bytes_s) + sum(c.time_s for c in sent)
        times.append(compute + rest)
    step_time_s = np.stack(times)
    rounds = workload.grad_accumulation
    return {
        "step_time_s": step_time_s,
        "tokens_per_s": b * s * rounds * world / step_time_s,
        "mfu": model_flops(spec, b, s) * rounds / (step_time_s * peak),
    }
