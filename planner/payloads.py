"""What the collectives of a step carry, as engines count it: full buffers and calls.

The payload of an all-gather is its output, of a reduce-scatter its input, of an all-reduce and a
broadcast its tensor, padding included. Scalars (overflow, gradient norm) are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from planner.memory.adapters import Trained, trained_groups
from planner.memory.ddp import bucket_bytes, model_order
from planner.memory.deepspeed import reductions
from planner.memory.deepspeed_fetch import PERSISTENT_NUMEL, Step, steady_fetches
from planner.memory.fsdp2 import row_shards
from planner.memory.groups import GroupSizes, group_numels, group_shapes, rows_of
from planner.model import ModelSpec
from planner.workload import Checkpointing, Engine, Precision, ReduceDtype, TrainingWorkload


class Payload(NamedTuple):
    """One kind of collective in a step: bytes of its full buffers together, and calls.

    Both are arrays where world sizes are.
    """

    collective: str
    bytes: Any
    calls: Any


def step_payloads(
    spec: ModelSpec, workload: TrainingWorkload, engine: Engine, stage: int, world_size: Any
) -> list[Payload]:
    """Return what the collectives of one steady step carry on each of `world_size` ranks.

    `spec` is the part of the model that one GPU holds; world sizes are integers, one or an array.
    FSDP2 skips its collectives with one rank, DeepSpeed its gathers.
    """
    trained = trained_groups(spec, workload)
    found = _PAYLOADS[engine](spec, workload, stage, world_size, trained)
    return [payload for payload in found if np.any(payload.calls)]


def element_bytes(engine: Engine, precision: Precision) -> tuple[int, int]:
    """Return the bytes per parameter that gathers and reductions carry."""
    compute = 2 if precision in (Precision.MIXED, Precision.BF16) else 4
    if engine is Engine.FSDP2 and precision is Precision.MIXED:
        return 2, 4
    return compute, compute


def _chosen_bytes(engine: Engine, workload: TrainingWorkload) -> tuple[int, int]:
    gathered, reduced = element_bytes(engine, workload.precision)
    chosen = {ReduceDtype.BF16: 2, ReduceDtype.FP32: 4}
    return gathered, chosen.get(workload.reduce_dtype, reduced)


def _padded(numel: Any, world_size: Any) -> Any:
    return -(-numel // world_size) * world_size


def _number_of_groups(sizes: GroupSizes, first_layer: int = 0) -> int:
    """Groups that hold anything; of the layers, those from `first_layer` on."""
    layers = [sizes.layers[layer] for layer in range(first_layer, len(sizes.layers.kinds))]
    return sum(bool(size) for size in (sizes.embedding, *layers, sizes.head))


def _number_of_layers(sizes: GroupSizes, first_layer: int = 0) -> int:
    return _number_of_groups(GroupSizes(0, sizes.layers, 0), first_layer)


def _reductions(workload: TrainingWorkload) -> int:
    """How often stages that shard gradients reduce them."""
    return workload.grad_accumulation if workload.sync_each_micro_batch else 1


def _peakmark(
    spec: ModelSpec,
    workload: TrainingWorkload,
    stage: int,
    world_size: Any,
    trained: Trained | None,
) -> list[Payload]:
    """Our engine: a group (embedding, each layer, head) is one flat buffer, padded to the ranks.

    Stage 0 all-reduces P once. Stages 1 and 2 reduce-scatter P (2 for every micro-batch) and gather
    the updated P once. Stage 3 gathers layers for forward and backward, embedding and head once (a
    tied embedding for the head again), for every micro-batch.
    """
    gather_bytes, reduce_bytes = _chosen_bytes(Engine.PEAKMARK, workload)
    numels = trained.trained if trained else group_numels(spec)
    padded = numels.map(lambda numel: _padded(numel, world_size))
    reduced, groups = padded.total() * reduce_bytes, _number_of_groups(numels)
    if stage == 0:
        return [Payload("all_reduce", reduced, groups)]
    times = _reductions(workload) if stage >= 2 else 1
    scatter = Payload("reduce_scatter", reduced * times, groups * times)
    if stage < 3:
        return [Payload("all_gather", padded.total() * gather_bytes, groups), scatter]
    rounds = workload.grad_accumulation
    is_tied = spec.tie_word_embeddings
    numel, calls = _gathered_twice(numels, padded, is_tied)
    if trained:
        frozen = trained.frozen.map(lambda numel: _padded(numel, world_size))
        more, more_calls = _gathered_twice(trained.frozen, frozen, is_tied, trained.first_layer)
        numel, calls = numel + more, calls + more_calls
    return [Payload("all_gather", numel * gather_bytes * rounds, calls * rounds), scatter]


def _gathered_twice(
    numels: GroupSizes, padded: GroupSizes, is_tied: bool, first_layer: int = 0
) -> tuple[Any, int]:
    """Elements and calls that gather everything once, and again what is used twice.

    That is layers from `first_layer` on, for the backward, and a tied embedding, for the head.
    """
    elements = padded.total() + padded.layers.total(first_layer) + is_tied * padded.embedding
    again = _number_of_layers(numels, first_layer) + (is_tied and bool(numels.embedding))
    return elements, _number_of_groups(numels) + again


def _several(world_size: Any) -> Any:
    """Return 1 where there is more than one rank, else 0.

    One world size gives a Python int, an array floats: bytes of many micro-batches pass 2^63.
    """
    return np.not_equal(world_size, 1) * 1.0 if np.ndim(world_size) else int(world_size != 1)


def _fsdp2(
    spec: ModelSpec,
    workload: TrainingWorkload,
    stage: int,
    world_size: Any,
    trained: Trained | None,
) -> list[Payload]:
    """FSDP2: each layer is a unit, the rest another; parameters are padded row by row.

    It gathers for every forward, at stage 3 layers again for the backward, and reduces in fp32 where
    precision is mixed. Ahead of a backward that ends at the first trained layer it gathers one more.
    """
    gather_bytes, reduce_bytes = _chosen_bytes(Engine.FSDP2, workload)
    every = rows_of(trained.shapes) if trained else group_shapes(spec)
    reduced = rows_of(trained.trained_shapes) if trained else every
    rounds, times = workload.grad_accumulation, _reductions(workload)

    def whole(rows: Any) -> Any:
        return row_shards(rows, world_size) * world_size

    layers = [whole(rows) for rows in every["layers"]]
    root = whole(every["embedding"] + every["head"])
    again = layers[max(trained.first_layer - 1 if trained else 0, 0) :] if stage == 3 else []
    units = [rows for rows in (*reduced["layers"], reduced["embedding"] + reduced["head"]) if rows]
    several = _several(world_size)
    gathered = (root + sum(layers) + sum(again)) * gather_bytes * rounds
    calls = (1 + len(layers) + len(again)) * rounds
    scattered = sum(whole(rows) for rows in units) * reduce_bytes * times
    return [
        Payload("all_gather", gathered * several, calls * several),
        Payload("reduce_scatter", scattered * several, len(units) * times * several),
    ]


def _ddp(
    spec: ModelSpec,
    workload: TrainingWorkload,
    stage: int,
    world_size: Any,
    trained: Trained | None,
) -> list[Payload]:
    """DDP all-reduces its buckets for every micro-batch it syncs.

    ZeroRedundancyOptimizer (stage 1) broadcasts every parameter after the step.
    """
    size = element_bytes(Engine.DDP, workload.precision)[1]
    sizes_bytes = [tensor.numel * size for _, tensor in model_order(spec, size, trained)]
    times, buckets = _reductions(workload), len(bucket_bytes(sizes_bytes[::-1]))
    reduced = Payload("all_reduce", sum(sizes_bytes) * times, buckets * times)
    if stage == 0:
        return [reduced]
    return [Payload("broadcast", sum(sizes_bytes), len(sizes_bytes)), reduced]


def _deepspeed(
    spec: ModelSpec,
    workload: TrainingWorkload,
    stage: int,
    world_size: Any,
    trained: Trained | None,
) -> list[Payload]:
    """DeepSpeed: stages 1 and 2 all-reduce each bucket and gather the flat buffer, padded to 2N.

    Stage 1 reduces after the last micro-batch only. Stage 3 reduce-scatters its buckets, every
    parameter padded; it gathers what its coordinator fetches, and after the step, one by one, the
    small parameters that it keeps whole.
    """
    rounds, several = workload.grad_accumulation, _several(world_size)
    buckets = sum(len(filled) for filled in reductions(spec).values())
    if stage < 3:
        times = rounds if stage == 2 else 1
        flat = 2 * _padded(spec.parameters, 2 * world_size)
        return [
            Payload("all_gather", flat * several, several),
            Payload("all_reduce", 2 * spec.parameters * times, buckets * times),
        ]
    recomputes = workload.checkpointing is Checkpointing.FULL
    fetched, calls = _fetched(spec, recomputes)
    every = Counter(tensor.numel for _, tensor in model_order(spec, 2))
    kept = {numel: count for numel, count in every.items() if numel <= PERSISTENT_NUMEL}

    def whole(numels: Mapping[int, int]) -> Any:
        return 2 * sum(count * _padded(numel, world_size) for numel, count in numels.items())

    gathered = whole(fetched) * rounds + whole(kept)
    kept_calls = sum(kept.values())
    return [
        Payload("all_gather", gathered * several, (calls * rounds + kept_calls) * several),
        Payload("reduce_scatter", whole(every) * rounds, buckets * rounds),
    ]


@lru_cache(maxsize=64)
def _fetched(spec: ModelSpec, recomputes: bool) -> tuple[Counter[int], int]:
    """Sizes of the parameters fetched in a micro-batch, with how often each, and the calls."""
    fetches = steady_fetches(spec, recomputes)
    gathers = [
        event for events in fetches.events.values() for event in events if event.step is Step.GATHER
    ]
    sizes = Counter(parameter.numel for event in gathers for parameter in event.parameters)
    return sizes, fetches.calls


class Stage3Parameters(NamedTuple):
    """Parameter tensors that DeepSpeed's stage 3 handles in a micro-batch.

    `forward` of its `fetched` ones are fetched in the forward; `kept` are whole on every rank.
    """

    forward: int
    fetched: int
    kept: int
    every: int


@lru_cache(maxsize=64)
def stage3_parameters(spec: ModelSpec, recomputes: bool) -> Stage3Parameters:
    """Return how many parameter tensors DeepSpeed's stage 3 fetches, keeps and has."""
    sizes = [tensor.numel for _, tensor in model_order(spec, 2)]
    kept = sum(numel <= PERSISTENT_NUMEL for numel in sizes)
    fetched = _fetched(spec, recomputes)[0].total()
    return Stage3Parameters(min(fetched, len(sizes) - kept), fetched, kept, len(sizes))


_PAYLOADS: Mapping[Engine, Callable[..., list[Payload]]] = {
    Engine.PEAKMARK: _peakmark,
    Engine.FSDP2: _fsdp2,
    Engine.DDP: _ddp,
    Engine.ZERO_REDUNDANCY: _ddp,
    Engine.DEEPSPEED: _deepspeed,
}
