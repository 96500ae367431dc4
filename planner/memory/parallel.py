"""Tensor, pipeline, context and expert parallelism: how a model and its tokens are divided.

Each data-parallel rank is a group of tensor x pipeline x context GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.families import count_parameters
from planner.model import ModelSpec
from planner.rank import RankSpec
from planner.workload import Parallelism, TrainingWorkload


def is_split(parallelism: Parallelism) -> bool:
    """Whether anything but training state is spread over GPUs."""
    sizes = (parallelism.pipeline_parallel, parallelism.context_parallel)
    return max(*sizes, parallelism.tensor_parallel, parallelism.expert_parallel) > 1


def group_size(parallelism: Parallelism) -> int:
    """GPUs that work on one micro-batch together: one data-parallel rank."""
    return (
        parallelism.tensor_parallel * parallelism.pipeline_parallel * parallelism.context_parallel
    )


def state_sharing(parallelism: Parallelism) -> Parallelism:
    """The plan as engines share training state: over data- and context-parallel GPUs alike.

    GPUs of a context group hold the same parameters, so ZeRO cuts the state over all of them
    (Megatron-LM's distributed optimizer, torchtitan's `dp_shard_cp` mesh).
    """
    shards = parallelism.world_size * parallelism.context_parallel
    return replace(parallelism, world_size=shards, context_parallel=1)


def rank_workload(workload: TrainingWorkload, parallelism: Parallelism) -> TrainingWorkload:
    """The workload of one GPU: its tokens of each sequence."""
    if parallelism.context_parallel == 1:
        return workload
    length = workload.sequence_length // parallelism.context_parallel
    return replace(workload, sequence_length=length)


def layers_per_stage(num_layers: int, stages: int) -> list[int]:
    """Layers of each pipeline stage: as even as can be, the first ones one more."""
    each, more = divmod(num_layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def in_flight(workload: TrainingWorkload, parallelism: Parallelism, stage: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B."""
    return min(parallelism.pipeline_parallel - stage, workload.grad_accumulation)


@lru_cache(maxsize=256)
def stage_specs(spec: ModelSpec, parallelism: Parallelism) -> tuple[ModelSpec, ...]:
    """One GPU's part of the model for each pipeline stage; the model itself where none is split."""
    if not is_split(parallelism):
        return (spec,)
    stages = parallelism.pipeline_parallel
    first, parts = 0, []
    for stage, num_layers in enumerate(layers_per_stage(spec.num_layers, stages)):
        parts.append(_part(spec, parallelism, stage, slice(first, first + num_layers)))
        first += num_layers
    return tuple(parts)


def _part(spec: ModelSpec, parallelism: Parallelism, stage: int, layers: slice) -> RankSpec:
    shards, stages = parallelism.tensor_parallel, parallelism.pipeline_parallel
    whole = {name: getattr(spec, name) for name in ModelSpec.__dataclass_fields__}
    own = {
        "num_layers": layers.stop - layers.start,
        "num_heads": spec.num_heads // shards,
        # With more GPUs than key-value heads, each GPU keeps one, as others do.
        "num_kv_heads": max(spec.num_kv_heads // shards, 1),
        "intermediate_size": spec.intermediate_size // shards,
        "expert_size": spec.expert_size // shards,
        "shared_expert_size": spec.shared_expert_size // shards,
        "vocab_size": spec.vocab_size // shards,
        # First and last stage each hold a copy of a tied weight.
        "tie_word_embeddings": spec.tie_word_embeddings and stages == 1,
        **_of_these_layers(whole, layers),
    }
    part = RankSpec(
        **{**whole, **own},
        has_embedding=stage == 0,
        has_head=stage == stages - 1,
        hidden_shards=shards if parallelism.sequence_parallel else 1,
        expert_shards=parallelism.expert_parallel,
    )
    return replace(part, parameters=count_parameters(part))


def _of_these_layers(whole: dict[str, Any], layers: slice) -> dict[str, Any]:
    """What says something of every layer, cut to these."""
    return {
        name: value[layers]
        for name, value in whole.items()
        if name.endswith("_layers")
        and isinstance(value, tuple)
        and len(value) == whole["num_layers"]
    }
