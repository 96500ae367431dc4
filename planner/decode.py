"""How fast a serving plan decodes: one token for every sequence, by the same roofline."""

from __future__ import annotations

from planner.families import parameter_shapes
from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.operations import Cost, matmul
from planner.rank import is_expert
from planner.serving.memory import ServingMemory, kv_sequence_bytes
from planner.throughput import Throughput, main_bound, peak_flop_s, time_operations
from planner.workload import ServingWorkload, WeightsDtype

_COMPUTE_DTYPE = {WeightsDtype.FP32: "fp32", WeightsDtype.FP16: "fp16"}


def _linear_parameters(spec: ModelSpec) -> float:
    """Return the parameters of the layers' products that one token uses, over all layers."""
    total = 0.0
    for parameter in parameter_shapes(spec):
        is_product = len(parameter.shape) > 1 and not parameter.name.endswith("bias")
        if parameter.group == "layer" and is_product:
            share = spec.experts_per_token / spec.num_experts if is_expert(parameter) else 1.0
            total += share * parameter.total_numel
    return total


def _read_weights_bytes(spec: ModelSpec, rows: float, memory: ServingMemory) -> float:
    """Return the bytes of the layers' weights that a step of `rows` tokens reads.

    Of the experts those that some token is expected to visit when each chooses uniformly.
    """
    weights = [e for e in memory.ledger if e.component == "parameters" and e.owner == "layer"]
    total = float(sum(entry.bytes for entry in weights))
    if not spec.num_experts:
        return total
    experts = float(sum(entry.bytes for entry in weights if ".experts." in entry.name))
    unvisited: float = (1 - spec.experts_per_token / spec.num_experts) ** rows
    return total - unvisited * experts


def _flops_per_cached_token(spec: ModelSpec) -> float:
    """Return the FLOPs of one query row over one cached token of a layer: QK^T and PV.

    Latent attention computes on the cached latents themselves, its up-projections moved to the
    query's and the output's side (DeepSeek-V2, section 2.1.2): as many products as
    `_linear_parameters` counts.
    """
    if spec.latent is None:
        return 4.0 * spec.query_size
    return 2.0 * spec.num_heads * (2 * spec.latent.kv_rank + spec.latent.rope_dim)


def _decode_costs(spec: ModelSpec, workload: ServingWorkload, memory: ServingMemory) -> list[Cost]:
    """Return the costs of one decode step at full context.

    The weights of the layers are read once, the whole cache of every sequence once.
    """
    rows = float(workload.sequences)
    cache_bytes = rows * kv_sequence_bytes(spec, workload.kv_dtype, workload.context_length)
    window = min(workload.context_length, spec.sliding_window or workload.context_length)
    sliding = spec.num_sliding_layers
    seen = (spec.num_layers - sliding) * workload.context_length + sliding * window
    element_bytes = 4 if workload.weights_dtype is WeightsDtype.FP32 else 2
    return [
        Cost(
            name="linear",
            flops=2.0 * rows * _linear_parameters(spec),
            bytes=_read_weights_bytes(spec, rows, memory),
        ),
        Cost(
            name="attention", flops=rows * _flops_per_cached_token(spec) * seen, bytes=cache_bytes
        ),
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
