"""A plan: model + workload + parallelism + hardware, read from JSON and written back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from planner.checks import (
    canonical_json,
    check_choice,
    check_integer,
    check_mapping,
    check_number,
)
from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.hardware import Gpu, parse_gpu
from planner.model import ModelSpec
from planner.presets import resolve_model, resolve_preset

SCHEMA = 1
MAX_TOKENS_PER_SEQUENCE = 2**24
MAX_COUNT = 65536
MAX_TRITON_HEAD_DIM = 256


class Job(StrEnum):
    """What the GPUs do."""

    TRAIN = "train"
    SERVE = "serve"


class Optimizer(StrEnum):
    """Update rule and implementation; SGD has momentum 0.9."""

    ADAMW_FUSED = "adamw_fused"
    ADAMW_FOREACH = "adamw_foreach"
    ADAMW_LOOP = "adamw_loop"
    SGD = "sgd"


class Precision(StrEnum):
    """Element types of parameters, gradients, optimizer states and compute."""

    MIXED = "mixed"
    BF16 = "bf16"
    FP32 = "fp32"
    AUTOCAST = "autocast"


class Attention(StrEnum):
    """Implementation of the attention operation."""

    EAGER = "eager"
    SDPA = "sdpa"
    TRITON = "triton"


class Checkpointing(StrEnum):
    """Whether layers keep only their input and recompute in the backward."""

    NONE = "none"
    FULL = "full"


class Engine(StrEnum):
    """What shards the training state."""

    PEAKMARK = "peakmark"
    FSDP2 = "fsdp2"


class WeightsDtype(StrEnum):
    """Element type of served weights."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class KvDtype(StrEnum):
    """Element type of the key-value cache."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkload:
    """One optimizer step on one rank: `grad_accumulation` micro-batches of `micro_batch` rows."""

    sequence_length: int = 4096
    micro_batch: int = 1
    grad_accumulation: int = 1
    optimizer: Optimizer = Optimizer.ADAMW_FUSED
    precision: Precision = Precision.MIXED
    attention: Attention = Attention.SDPA
    checkpointing: Checkpointing = Checkpointing.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorkload:
    """Requests held at once on one GPU, each up to `context_length` tokens.

    `utilization` is the share of visible memory that the engine may take.
    """

    context_length: int = 8192
    sequences: int = 8
    weights_dtype: WeightsDtype = WeightsDtype.BF16
    kv_dtype: KvDtype = KvDtype.BF16
    utilization: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Data parallelism: `world_size` ranks share the training state as `zero_stage` says."""

    engine: Engine = Engine.PEAKMARK
    zero_stage: int = 3
    world_size: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a person wants to run; `model_source` is how they named the model."""

    model: ModelSpec
    workload: TrainingWorkload | ServingWorkload
    parallelism: Parallelism
    hardware: Gpu
    model_source: Mapping[str, Any] = field(hash=False)

    @property
    def job(self) -> Job:
        """Training or serving."""
        return Job.TRAIN if isinstance(self.workload, TrainingWorkload) else Job.SERVE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; `parse_plan` reads it back to an equal plan."""
        return {
            "schema": SCHEMA,
            "job": str(self.job),
            "model": dict(self.model_source),
            "workload": flat_dict(self.workload),
            "parallelism": flat_dict(self.parallelism),
            "hardware": self.hardware.to_dict(),
        }


def flat_dict(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, choices as text; nested values stay as they are.

    `dataclasses.asdict` copies every value, which would take a third of a prediction's time.
    """
    pairs = ((name, getattr(values, name)) for name in values.__dataclass_fields__)
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in pairs}


@lru_cache(maxsize=256)
def _parse_model_text(text: str) -> tuple[ModelSpec, dict[str, Any]]:
    known = frozenset(("preset", "config", "name", "overrides"))
    source = check_mapping("model", json.loads(text), known)
    overrides = check_mapping("model.overrides", source.get("overrides") or {})
    edits = {"overrides": overrides} if overrides else {}
    if ("preset" in source) == ("config" in source):
        raise PlanError("model", source, "an object with either preset or config")
    if "preset" in source:
        preset = resolve_preset(source["preset"])
        return resolve_model(preset.id, overrides), {"preset": preset.id, **edits}
    config = check_mapping("model.config", source["config"])
    name = source.get("name", "custom model")
    spec = spec_from_config(config, name=name, overrides=overrides)
    return spec, {"config": config, "name": name, **edits}


def _parse_model(value: object) -> tuple[ModelSpec, dict[str, Any]]:
    return _parse_model_text(canonical_json("model", check_mapping("model", value)))


def _parse_training(values: Mapping[str, Any]) -> TrainingWorkload:
    default = flat_dict(TrainingWorkload())
    merged = {**default, **check_mapping("workload", values, frozenset(default))}
    return TrainingWorkload(
        sequence_length=check_integer(
            "workload.sequence_length", merged["sequence_length"], 1, MAX_TOKENS_PER_SEQUENCE
        ),
        micro_batch=check_integer("workload.micro_batch", merged["micro_batch"], 1, MAX_COUNT),
        grad_accumulation=check_integer(
            "workload.grad_accumulation", merged["grad_accumulation"], 1, MAX_COUNT
        ),
        optimizer=check_choice("workload.optimizer", merged["optimizer"], Optimizer),
        precision=check_choice("workload.precision", merged["precision"], Precision),
        attention=check_choice("workload.attention", merged["attention"], Attention),
        checkpointing=check_choice(
            "workload.checkpointing", merged["checkpointing"], Checkpointing
        ),
    )


def _parse_serving(values: Mapping[str, Any]) -> ServingWorkload:
    default = flat_dict(ServingWorkload())
    merged = {**default, **check_mapping("workload", values, frozenset(default))}
    return ServingWorkload(
        context_length=check_integer(
            "workload.context_length", merged["context_length"], 1, MAX_TOKENS_PER_SEQUENCE
        ),
        sequences=check_integer("workload.sequences", merged["sequences"], 1, MAX_COUNT),
        weights_dtype=check_choice("workload.weights_dtype", merged["weights_dtype"], WeightsDtype),
        kv_dtype=check_choice("workload.kv_dtype", merged["kv_dtype"], KvDtype),
        utilization=check_number("workload.utilization", merged["utilization"], 0.01, 1.0),
    )


def _parse_parallelism(values: Mapping[str, Any]) -> Parallelism:
    default = flat_dict(Parallelism())
    merged = {**default, **check_mapping("parallelism", values, frozenset(default))}
    engine = check_choice("parallelism.engine", merged["engine"], Engine)
    stage = check_integer("parallelism.zero_stage", merged["zero_stage"], 0, 3)
    world_size = check_integer("parallelism.world_size", merged["world_size"], 1, MAX_COUNT)
    parallelism = Parallelism(engine=engine, zero_stage=stage, world_size=world_size)
    check_parallelism(parallelism)
    return parallelism


def check_parallelism(parallelism: Parallelism) -> None:
    """Raise PlanError where the engine has no such stage."""
    stage = parallelism.zero_stage
    if parallelism.engine is Engine.FSDP2 and stage < 2:
        sentence = (
            f"parallelism.zero_stage is {stage}: fsdp2 shards gradients and optimizer states "
            "always, so it has stage 2 (parameters kept after the forward) and stage 3 only."
        )
        raise PlanError("parallelism.zero_stage", stage, "2 or 3", sentence=sentence)


def _check_length(model: ModelSpec, field_name: str, length: int) -> None:
    """Raise PlanError where a model has a learned row for each position and too few of them."""
    if model.family == "gpt2" and length > model.max_positions:
        raise PlanError(
            field_name, length, f"at most {model.max_positions}, the positions {model.name} has"
        )


def _attention_obstacle(model: ModelSpec, workload: TrainingWorkload) -> str | None:
    """Return why the chosen kernel cannot compute this model's attention, or None."""
    window = model.sliding_window
    capped = model.attention_logit_softcap is not None
    if workload.attention is Attention.EAGER:
        return None
    if capped or (model.family == "gemma2" and workload.attention is Attention.SDPA):
        return "it does not cap attention logits, as this model does"
    if workload.attention is Attention.SDPA:
        return None
    if window is not None and window < workload.sequence_length:
        return f"it has no sliding window, and this model's window of {window} is shorter"
    if model.head_dim > MAX_TRITON_HEAD_DIM:
        return f"its largest head size is {MAX_TRITON_HEAD_DIM}, this model's is {model.head_dim}"
    return None


def _check_attention(model: ModelSpec, workload: TrainingWorkload) -> None:
    """Raise PlanError where the chosen kernel cannot compute this model's attention."""
    obstacle = _attention_obstacle(model, workload)
    if obstacle is None:
        return
    capped = model.attention_logit_softcap is not None
    others = "eager" if capped or workload.attention is Attention.SDPA else "eager or sdpa"
    sentence = f"workload.attention is '{workload.attention}': {obstacle}; use {others}."
    raise PlanError("workload.attention", str(workload.attention), others, sentence=sentence)


def check_training(model: ModelSpec, workload: TrainingWorkload) -> None:
    """Raise PlanError where the model cannot be trained at this length or with this attention."""
    _check_length(model, "workload.sequence_length", workload.sequence_length)
    _check_attention(model, workload)


_PLAN_FIELDS = frozenset(("schema", "job", "model", "workload", "parallelism", "hardware"))


def parse_plan(mapping: object) -> Plan:
    """Read a plan's JSON object; absent workload and parallelism fields take their defaults.

    Raises PlanError, and only PlanError, with one sentence naming the field at fault.
    """
    values = check_mapping("plan", mapping, _PLAN_FIELDS)
    if values.get("schema", SCHEMA) != SCHEMA:
        raise PlanError("schema", values["schema"], f"{SCHEMA}, the version this program reads")
    for key in ("model", "hardware"):
        if key not in values:
            raise PlanError(key, None, "present", sentence=f"{key} is missing: a plan needs it.")
    job = check_choice("job", values.get("job", "train"), Job)
    model, source = _parse_model(values["model"])
    given = check_mapping("workload", values.get("workload", {}))
    workload: TrainingWorkload | ServingWorkload
    if job is Job.TRAIN:
        workload = _parse_training(given)
        check_training(model, workload)
    else:
        workload = _parse_serving(given)
        _check_length(model, "workload.context_length", workload.context_length)
    return Plan(
        model=model,
        workload=workload,
        parallelism=_parse_parallelism(check_mapping("parallelism", values.get("parallelism", {}))),
        hardware=parse_gpu(values["hardware"]),
        model_source=source,
    )


def plan_hash(plan: Plan) -> str:
    """Return the SHA-256 of the plan's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json("plan", plan.to_dict()).encode()).hexdigest()


def default_plan() -> Plan:
    """Return the plan a new page starts from: Llama-3.1-8B, ZeRO-3 on eight H200."""
    return parse_plan(
        {
            "schema": SCHEMA,
            "job": "train",
            "model": {"preset": "meta-llama/Llama-3.1-8B"},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )
