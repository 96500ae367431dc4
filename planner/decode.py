"""How fast a serving plan decodes: one token for every sequence, by the same roofline."""

from __future__ import annotations

from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.operations import Cost, matmul
from planner.serving import ServingMemory, kv_sequence_bytes
from planner.throughput import Throughput, main_bound, peak_flop_s, time_operations
from planner.workload import ServingWorkload, WeightsDtype

_COMPUTE_DTYPE = {WeightsDtype.FP32: "fp32", WeightsDtype.FP16: "fp16"}


def _linear_parameters(spec: ModelSpec) -> float:
    """Return the parameters of a layer's products that one token uses, over all layers."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = hidden * (2 * spec.query_size + 2 * spec.kv_size)
    products = 2 if spec.family == "gpt2" else 3
    mlp = products * hidden * inner * max(spec.experts_per_token, 1)
    return float(spec.num_layers * (attention + mlp + hidden * spec.num_experts))


def _decode_costs(spec: ModelSpec, workload: ServingWorkload, memory: ServingMemory) -> list[Cost]:
    """Return the costs of one decode step at full context.

    All weights of the layers are read once, the whole cache of every sequence once. Four FLOPs
    per cached element pair of a query head: QK^T and PV.
    """
    rows = float(workload.sequences)
    weights_bytes = float(
        sum(e.bytes for e in memory.ledger if e.component == "parameters" and e.owner == "layer")
    )
    cache_bytes = rows * kv_sequence_bytes(spec, workload.kv_dtype, workload.context_length)
    window = min(workload.context_length, spec.sliding_window or workload.context_length)
    sliding = spec.num_sliding_layers
    seen = (spec.num_layers - sliding) * workload.context_length + sliding * window
    element_bytes = 4 if workload.weights_dtype is WeightsDtype.FP32 else 2
    return [
        Cost(name="linear", flops=2.0 * rows * _linear_parameters(spec), bytes=weights_bytes),
        Cost(name="attention", flops=4.0 * rows * spec.query_size * seen, bytes=cache_bytes),
        matmul("head", rows, spec.hidden_size, spec.vocab_size, element_bytes),
    ]


def decode_throughput(
    spec: ModelSpec, workload: ServingWorkload, memory: ServingMemory, gpu: Gpu, replicas: int
) -> Throughput:
    """Return the speed of one decode step of all sequences; `replicas` GPUs serve side by side.

    Quantised weights are widened before the product, so 16-bit rates bound it.
    """
    peak, note = peak_flop_s(gpu, _COMPUTE_DTYPE.get(workload.weights_dtype, "bf16"))
    costs = _decode_costs(spec, workload, memory)
    operations = time_operations(costs, peak, gpu.mem_bandwidth_bytes_s)
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
        notes=(note,) if note else (),
    )
