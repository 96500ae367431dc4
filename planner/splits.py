"""What cannot be split over GPUs as planned, and why: one sentence each."""

from __future__ import annotations

from typing import NoReturn

from planner.errors import PlanError
from planner.model import ModelSpec
from planner.workload import Attention, Engine, Parallelism, Precision, TrainingWorkload

_SPLIT_ENGINES = (Engine.PEAKMARK, Engine.FSDP2)
# Families whose traced templates tell the dimensions that are divided (heads, MLP width, vocabulary)
# from the hidden size; in others the hidden size is that of all heads.
TENSOR_PARALLEL_FAMILIES = frozenset(
    (
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
        *("mixtral", "qwen3_moe"),
    )
)


def _refuse(name: str, parallelism: Parallelism, allowed: str, reason: str) -> NoReturn:
    field, value = f"parallelism.{name}", getattr(parallelism, name)
    raise PlanError(field, value, allowed, sentence=f"{field} is {value}: {reason}.")


def check_splits(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Raise PlanError where tensors, layers, tokens or experts cannot be divided as planned."""
    _check_engine(workload, parallelism)
    _check_tensor(model, workload, parallelism)
    _check_pipeline(model, workload, parallelism)
    _check_context(model, workload, parallelism)
    _check_experts(model, parallelism)


def check_whole(parallelism: Parallelism) -> None:
    """Raise PlanError for a serving plan that splits the model: each GPU serves all of it."""
    for name in _splits(parallelism):
        _refuse(name, parallelism, "1", "a serving plan holds the whole model on every GPU")


def _splits(parallelism: Parallelism) -> list[str]:
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    return [name for name in names if getattr(parallelism, name) > 1]


def _check_engine(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    for name in _splits(parallelism):
        if parallelism.engine not in _SPLIT_ENGINES:
            reason = f"it is predicted for the engines peakmark and fsdp2, not {parallelism.engine}"
            _refuse(name, parallelism, "1 with this engine", reason)
        if workload.lora_rank:
            _refuse(name, parallelism, "1 with adapters", "it is not predicted with adapters")


def _check_tensor(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    shards = parallelism.tensor_parallel
    if shards == 1:
        if parallelism.sequence_parallel:
            reason = "it shares the tokens among tensor-parallel GPUs, so it needs tensor_parallel"
            _refuse("sequence_parallel", parallelism, "false", f"{reason} above 1")
        return
    if model.family not in TENSOR_PARALLEL_FAMILIES:
        reason = f"how {model.family} divides over tensor-parallel GPUs is not predicted"
        _refuse("tensor_parallel", parallelism, "1", reason)
    for name, size in (
        ("attention heads", model.num_heads),
        ("MLP columns", model.intermediate_size),
        ("expert columns", model.expert_size),
        ("vocabulary rows", model.vocab_size),
    ):
        if size % shards:
            reason = f"the model's {size:,} {name} cannot be divided by it"
            _refuse("tensor_parallel", parallelism, f"a divisor of {size}", reason)
    kv_heads = model.num_kv_heads
    if kv_heads % shards and shards % kv_heads:
        reason = f"the model's {kv_heads} key-value heads can neither be divided nor repeated by it"
        _refuse("tensor_parallel", parallelism, f"a divisor or multiple of {kv_heads}", reason)
    own_tokens = workload.sequence_length // parallelism.context_parallel
    if parallelism.sequence_parallel and own_tokens % shards:
        reason = f"{own_tokens:,} tokens cannot be divided by tensor_parallel {shards}"
        _refuse("sequence_parallel", parallelism, "false at this length", reason)


def _check_pipeline(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    stages = parallelism.pipeline_parallel
    if stages == 1:
        return
    if stages > model.num_layers:
        reason = f"the model has {model.num_layers} layers, and a stage needs one"
        _refuse("pipeline_parallel", parallelism, f"at most {model.num_layers}", reason)
    if workload.checkpoint_every > 1 or workload.frozen_layers:
        what = "frozen_layers" if workload.frozen_layers else "checkpoint_every above 1"
        _refuse("pipeline_parallel", parallelism, "1", f"it is not predicted with {what}")


def _check_context(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    shards, length = parallelism.context_parallel, workload.sequence_length
    if shards == 1:
        return
    if length % shards:
        reason = f"{length:,} tokens cannot be divided by it"
        _refuse("context_parallel", parallelism, f"a divisor of {length}", reason)
    if workload.packed:
        _refuse("context_parallel", parallelism, "1", "it is not predicted for packed rows")
    masked = any(model.sliding_layers)
    unfused = workload.precision is Precision.FP32 and model.num_heads != model.num_kv_heads
    if workload.attention is Attention.EAGER:
        reason = "a ring needs attention that keeps no scores: use sdpa or triton"
        _refuse("context_parallel", parallelism, "1 with eager attention", reason)
    if workload.attention is Attention.SDPA and (masked or unfused):
        reason = "SDPA has no fused kernel for this model here, and a ring needs one"
        _refuse("context_parallel", parallelism, "1 with this attention", reason)


def _check_experts(model: ModelSpec, parallelism: Parallelism) -> None:
    shards, ranks = parallelism.expert_parallel, parallelism.world_size
    if shards == 1:
        return
    if not model.num_experts:
        _refuse("expert_parallel", parallelism, "1", "this model has no experts")
    if model.num_experts % shards:
        reason = f"the model's {model.num_experts} experts cannot be divided by it"
        _refuse("expert_parallel", parallelism, f"a divisor of {model.num_experts}", reason)
    if ranks % shards:
        reason = (
            f"it splits the experts over data-parallel ranks, and {ranks} cannot be divided by it"
        )
        _refuse("expert_parallel", parallelism, f"a divisor of {ranks}", reason)
    if parallelism.engine is not Engine.PEAKMARK:
        reason = f"it is predicted for the engine peakmark, not {parallelism.engine}"
        _refuse("expert_parallel", parallelism, "1 with this engine", reason)
