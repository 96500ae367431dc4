"""How fast a serving plan decodes: one token for every sequence at full context."""

from __future__ import annotations

from dataclasses import replace

from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.serving.times import ServedModel, StepPart, StepTimes
from planner.throughput import CALIBRATED, OperationTime, Throughput, main_bound, peak_flop_s
from planner.workload import KvDtype, ServingWorkload, WeightsDtype

_COMPUTE_DTYPE = {WeightsDtype.FP32: "fp32", WeightsDtype.FP16: "fp16"}


def decode_throughput(
    spec: ModelSpec, workload: ServingWorkload, gpu: Gpu, replicas: int
) -> Throughput:
    """Return the speed of one decode step of all sequences; `replicas` GPUs serve side by side.

    Quantised weights are widened before the product, so 16-bit rates bound it.
    """
    peak, note = peak_flop_s(gpu, _COMPUTE_DTYPE.get(workload.weights_dtype, "bf16"))
    served = ServedModel(
        spec=spec, gpu=gpu, weights_dtype=workload.weights_dtype, kv_dtype=workload.kv_dtype
    )
    times = StepTimes(served)
    total_tokens = workload.sequences * workload.context_length
    operations = tuple(map(_operation, times.decode_parts(workload.sequences, total_tokens)))
    step_time_s = sum(op.time_s for op in operations)
    flops = sum(op.flops for op in operations)
    per_gpu = workload.sequences / step_time_s
    return Throughput(
        step_time_s=step_time_s,
        tokens_per_s=per_gpu * replicas,
        tokens_per_s_per_gpu=per_gpu,
        mfu=flops / (step_time_s * peak),
        bound=main_bound(operations, 0.0),
        flops_per_step=flops,
        operations=operations,
        communication=(),
        notes=tuple(filter(None, (note, _scales_note(served, workload, step_time_s)))),
        label=CALIBRATED,
        source=times.source,
        ideal_s=sum(
            max(op.flops / peak, op.bytes / gpu.mem_bandwidth_bytes_s) for op in operations
        ),
    )


def _scales_note(served: ServedModel, workload: ServingWorkload, step_time_s: float) -> str | None:
    """Say what an fp8 cache costs with a scale for each token and head, as our engine keeps it."""
    if workload.kv_dtype is not KvDtype.FP8:
        return None
    total_tokens = workload.sequences * workload.context_length
    scaled = StepTimes(replace(served, token_scales=True))
    ratio = scaled.decode_s(workload.sequences, total_tokens) / step_time_s
    return (
        "The fp8 cache has one scale per tensor. With one for each token and head, as `peakmark decode` "
        f"keeps it, a step takes {ratio:.2f} times as long."
    )


def _operation(part: StepPart) -> OperationTime:
    return OperationTime(
        name=part.name, flops=part.flops, bytes=part.bytes, time_s=part.time_s, bound=part.bound
    )
