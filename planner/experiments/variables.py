"""The columns of an experiment: what a run was asked, and what kind of variable each choice is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from planner.attention.problem import AttentionProblem, Variant, is_exact, parse_job
from planner.checks import canonical_json
from planner.decode_run import parse_decode
from planner.model import ModelSpec
from planner.plan import Plan, parse_plan
from planner.serve_run import parse_serve
from planner.workload import Checkpointing, TrainingWorkload, flat_dict


class Kind(StrEnum):
    """What changing a variable changes.

    `algorithm`: the function that the model computes, or how it is trained. `system`: only how the
    same is computed. `work`: how much is computed, and how it was measured.
    """

    ALGORITHM = "algorithm"
    SYSTEM = "system"
    WORK = "work"


# What a model's name says already: beside another model they are no variables of their own.
MODEL_DIMENSIONS = (
    *("layers", "hidden size", "MLP inner size", "heads", "KV heads", "head size"),
    *("vocabulary", "sliding window", "experts", "experts per token", "tied embeddings"),
)
_ALGORITHM = (
    *("model", *MODEL_DIMENSIONS),
    *("precision", "optimizer", "LoRA rank", "LoRA targets", "base dtype", "frozen layers"),
    *("packed", "reduced in", "clipped at"),
    *("pattern", "causal", "window", "global tokens", "block", "block stride"),
    *("weights dtype", "cache dtype"),
)
_SYSTEM = (
    *("attention", "attention that ran", "checkpointing", "checkpoint every", "loss kernel"),
    *("optimizer kernel", "reduced after", "allocator", "optimizer is in"),
    *("engine", "ZeRO stage", "ranks", "TP", "SP", "PP", "CP", "EP", "world", "GPU"),
    *("cache layout", "page size", "fused kernels", "CUDA graphs", "rows at once", "pages"),
    "chunk tokens",
)
_WORK = (
    *("job", "sequence length", "micro-batch", "accumulation", "batch", "context", "new tokens"),
    *("requests", "begins from", "rank", "warm-up steps", "steps", "seed"),
)
# Of these a step or request takes no longer: they are how often it was measured.
MEASURED = frozenset({"warm-up steps", "steps", "seed"})
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(_ALGORITHM, Kind.ALGORITHM),
    **dict.fromkeys(_SYSTEM, Kind.SYSTEM),
    **dict.fromkeys(_WORK, Kind.WORK),
}
# AdamW's ways to update give the same numbers: the rule is one thing, its kernel another.
_ADAMW = {
    "adamw_fused": "fused",
    "adamw_foreach": "foreach",
    "adamw_loop": "loop",
    "adamw_triton": "our own",
}
Variables = dict[str, Any]


def model_variables(model: ModelSpec) -> Variables:
    """Return what describes a model: its name and the dimensions that its function depends on."""
    return {
        "model": model.name.rsplit("/", 1)[-1],
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "MLP inner size": model.intermediate_size,
        "heads": model.num_heads,
        "KV heads": model.num_kv_heads,
        "head size": model.head_dim,
        "vocabulary": model.vocab_size,
        "sliding window": model.sliding_window or "none",
        "experts": model.num_experts,
        "experts per token": model.experts_per_token,
        "tied embeddings": model.tie_word_embeddings,
    }


def plan_variables(plan: Plan) -> Variables:
    """Return the choices of a training or serving plan."""
    spread = plan.parallelism
    values: Variables = {
        **model_variables(plan.model),
        "engine": str(spread.engine),
        "ZeRO stage": spread.zero_stage,
        "ranks": spread.world_size,
        "TP": spread.tensor_parallel,
        "SP": spread.sequence_parallel,
        "PP": spread.pipeline_parallel,
        "CP": spread.context_parallel,
        "EP": spread.expert_parallel,
        "GPU": plan.hardware.name,
    }
    if isinstance(plan.workload, TrainingWorkload):
        return values | _training(plan.workload)
    return values | {
        "context": plan.workload.context_length,
        "batch": plan.workload.sequences,
        "weights dtype": str(plan.workload.weights_dtype),
        "cache dtype": str(plan.workload.kv_dtype),
    }


def _training(workload: TrainingWorkload) -> Variables:
    adapted = workload.lora_rank > 0
    optimizer = str(workload.optimizer)
    checkpointed = workload.checkpointing is not Checkpointing.NONE
    return {
        "sequence length": workload.sequence_length,
        "micro-batch": workload.micro_batch,
        "accumulation": workload.grad_accumulation,
        "precision": str(workload.precision),
        "optimizer": "adamw" if optimizer in _ADAMW else optimizer,
        "optimizer kernel": _ADAMW.get(optimizer),
        "attention": str(workload.attention),
        "checkpointing": str(workload.checkpointing),
        "checkpoint every": workload.checkpoint_every if checkpointed else None,
        "loss kernel": str(workload.loss),
        "reduced after": "each micro-batch" if workload.sync_each_micro_batch else "the step",
        "LoRA rank": workload.lora_rank,
        "LoRA targets": str(workload.lora_targets) if adapted else None,
        "base dtype": str(workload.base_dtype) if adapted else None,
        "frozen layers": workload.frozen_layers,
        "packed": workload.packed,
        "allocator": "expandable segments" if workload.expandable_segments else "default",
        "optimizer is in": "host memory" if workload.offload_optimizer else "GPU memory",
        "reduced in": str(workload.reduce_dtype),
        "clipped at": workload.max_grad_norm,
    }


def attention_variables(problem: AttentionProblem, variant: Variant) -> Variables:
    """Return the choices of one variant of an attention run: its kernel, and the pattern it sees.

    A pattern that hides nothing at this length is "full": it computes what the kernels do.
    """
    exact = is_exact(problem, variant)
    plain = variant in (Variant.EAGER, Variant.SDPA, Variant.TRITON)
    pattern = "full" if exact else str(variant)
    windowed = pattern in (Variant.WINDOW, Variant.GLOBAL_LOCAL)
    blocked = pattern == Variant.BLOCK_SPARSE
    return {
        "attention": str(variant) if plain else str(Variant.TRITON),
        "pattern": pattern,
        "window": problem.window if windowed else None,
        "global tokens": problem.global_tokens if pattern == Variant.GLOBAL_LOCAL else None,
        "block": problem.block if blocked else None,
        "block stride": problem.block_stride if blocked else None,
        "causal": problem.causal,
        "precision": problem.dtype,
        "heads": problem.heads,
        "KV heads": problem.kv_heads,
        "head size": problem.head_dim,
        "batch": problem.batch,
        "sequence length": problem.sequence_length,
    }


def _decode(given: object) -> Variables:
    run, model = parse_decode(given)
    return {
        **model_variables(model),
        "engine": "peakmark",
        "attention": str(run.attention),
        "weights dtype": str(run.dtype),
        "cache dtype": str(run.dtype if run.cache_dtype == "model" else run.cache_dtype),
        "cache layout": str(run.cache),
        "page size": run.page_size if run.cache == "paged" else None,
        "fused kernels": run.fused,
        "CUDA graphs": run.graphs,
        "batch": run.batch,
        "context": run.context,
        "new tokens": run.new_tokens,
    }


def _serve(given: object) -> Variables:
    run, model = parse_serve(given)
    trace = given.get("trace") if isinstance(given, Mapping) else None
    values = flat_dict(run)
    return {
        **model_variables(model),
        "engine": "peakmark",
        "attention": values["attention"],
        "weights dtype": values["dtype"],
        "cache dtype": values["dtype" if values["cache_dtype"] == "model" else "cache_dtype"],
        "cache layout": "paged",
        "page size": run.page_size,
        "fused kernels": run.fused,
        "CUDA graphs": run.graphs,
        "rows at once": run.rows,
        "pages": run.pages,
        "chunk tokens": run.chunk_tokens,
        "requests": _requests(trace, len(run.trace)),
    }


def _requests(trace: object, count: int) -> str:
    """Describe a trace of requests: the numbers it is drawn by, or a mark of the list."""
    if isinstance(trace, Mapping):
        return ", ".join(f"{name} {value}" for name, value in sorted(trace.items()))
    digest = hashlib.sha256(canonical_json("trace", trace).encode()).hexdigest()
    return f"{count} of the list {digest[:8]}"


def base_variables(spec: Mapping[str, Any]) -> Variables:
    """Return what every job spec says: job, world and how it was measured."""
    return {
        "job": str(spec.get("kind")),
        "world": str(spec.get("world")),
        "rank": spec.get("rank"),
        "warm-up steps": spec.get("warmup"),
        "steps": spec.get("steps"),
        "seed": spec.get("seed"),
        "begins from": spec.get("load_from") or "new weights",
    }


def spec_variables(spec: Mapping[str, Any]) -> Variables:
    """Return the choices of a job spec, but for which variant of attention or peer ran.

    Raises PlanError for a spec that this version cannot read.
    """
    values = base_variables(spec)
    if spec.get("plan") is not None:
        values |= plan_variables(parse_plan(spec["plan"]))
    readers: Mapping[str, Callable[[object], Variables]] = {"decode": _decode, "serve": _serve}
    if values["job"] in readers:
        values |= readers[values["job"]](spec.get(values["job"]))
    return values


def attention_variants(spec: Mapping[str, Any]) -> dict[str, Variables]:
    """Return the choices of every variant of an attention run's spec; raises PlanError."""
    problem, variants = parse_job(spec.get("attention"))
    return {str(variant): attention_variables(problem, variant) for variant in variants}
