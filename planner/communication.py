"""What the GPUs of a step send: collectives, their bytes on the wire and the time they take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.hardware import Gpu
from planner.interconnects import interconnect
from planner.memory.parallel import group_size
from planner.model import ModelSpec
from planner.operations import Numbers
from planner.rank import RankSpec
from planner.workload import Checkpointing, Parallelism, Precision, TrainingWorkload

# Between nodes: one 400 Gb/s port per GPU, the usual network of eight-GPU H100 and H200 nodes.
NETWORK_ID = "infiniband-ndr400"
# Where a card's own link is unknown: the slowest link of the table that joins GPUs of a node.
_FALLBACK_LINK_ID = "pcie4-x16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective in a step: bytes that a rank sends, calls, time."""

    collective: str
    bytes: Numbers
    count: int
    time_s: Numbers


def link_bytes_s(gpu: Gpu, world_size: Numbers) -> Numbers:
    """Return the slowest link of a ring: within a node the card's own, beyond it the network."""
    own = gpu.interconnect_bytes_s or interconnect(_FALLBACK_LINK_ID).bytes_s
    across = min(own, interconnect(NETWORK_ID).bytes_s)
    return np.where(np.asarray(world_size) > gpu.gpus_per_node, across, own)


def link_notes(gpu: Gpu, world_size: int) -> list[str]:
    """Return what was assumed about the links of this plan."""
    notes = []
    if gpu.interconnect_bytes_s is None and world_size > 1:
        notes.append("The GPU's link is not given: PCIe 4 x16 (31.5 GB/s) is assumed.")
    if world_size > gpu.gpus_per_node:
        notes.append(
            f"Beyond {gpu.gpus_per_node} GPUs the slower of the GPU's link and one 400 Gb/s "
            "network port per GPU (50 GB/s) is assumed."
        )
    return notes


# A ring all-reduce passes every byte twice: to be summed, then to be shared.
RING_PASSES = {"all_reduce": 2}


def group_collectives(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
    tokens: Numbers,
) -> list[Collective]:
    """Return what one GPU sends to others of its group in one step, for its part `spec` of a model.

    `tokens` are the group's per micro-batch and context shard. Per layer and direction: two
    all-reduces over tensor-parallel GPUs (or, with sequence parallelism, as many gathers and
    reduce-scatters of the same volume), the keys and values of a ring and in the backward their
    gradients too, the tokens of a layer's experts out and back. Checkpointing sends the forward's
    again. A pipeline stage sends activations forward and gradients back.
    """
    if not isinstance(spec, RankSpec):
        return []
    element = 4 if workload.precision is Precision.FP32 else 2
    rounds = workload.grad_accumulation
    passes = 2 if workload.checkpointing is Checkpointing.NONE else 3
    rows = (
        _tensor_volume(spec, parallelism, passes),
        _ring_volume(spec, parallelism, passes),
        _expert_volume(spec, parallelism, passes),
        _pipeline_volume(spec, parallelism),
    )
    return [
        _timed(name, tokens * float(width * element * rounds), count * rounds, gpu, gpus)
        for name, width, count, gpus in rows
        if width
    ]


# (collective, elements that a GPU sends per token and micro-batch, calls, GPUs that take part)
_Volume = tuple[str, float, int, int]


def _timed(name: str, size_bytes: Numbers, count: int, gpu: Gpu, gpus: int) -> Collective:
    time_s = size_bytes / link_bytes_s(gpu, gpus)
    return Collective(collective=name, bytes=size_bytes, count=count, time_s=time_s)


def _tensor_volume(spec: RankSpec, parallelism: Parallelism, passes: int) -> _Volume:
    gpus = parallelism.tensor_parallel
    # The ends add one each: the sum of the vocabulary's rows, and of the gradients to the head.
    calls = 2 * passes * spec.num_layers + spec.has_embedding + spec.has_head
    each = 2 * (gpus - 1) / gpus * spec.hidden_size
    return "tensor_all_reduce", calls * each, calls, gpus


def _ring_volume(spec: RankSpec, parallelism: Parallelism, passes: int) -> _Volume:
    steps, gpus = parallelism.context_parallel - 1, parallelism.context_parallel
    calls = (passes + 1) * steps * spec.num_layers
    return "ring_exchange", calls * 2.0 * spec.kv_size, calls, gpus * parallelism.tensor_parallel


def _expert_volume(spec: RankSpec, parallelism: Parallelism, passes: int) -> _Volume:
    ranks = parallelism.expert_parallel
    calls = 2 * passes * spec.num_expert_layers
    each = (ranks - 1) / ranks * spec.experts_per_token * spec.hidden_size
    return "expert_all_to_all", calls * each, calls, ranks * group_size(parallelism)


def _pipeline_volume(spec: RankSpec, parallelism: Parallelism) -> _Volume:
    calls = 2 - spec.has_embedding - spec.has_head
    width = calls * spec.hidden_size / spec.hidden_shards
    return "pipeline_send", width, calls, group_size(parallelism)
