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
    check_boolean,
    check_choice,
    check_integer,
    check_mapping,
    check_number,
)
from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.hardware import Gpu, parse_gpu
from planner.model import ModelSpec
from planner.obstacles import check_length, check_parallelism, check_training
from planner.presets import resolve_model, resolve_preset
from planner.splits import check_whole
from planner.workload import (
    DEFAULTS,
    Attention,
    BaseDtype,
    Checkpointing,
    Engine,
    KvDtype,
    LoraTargets,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    ReduceDtype,
    ServingWorkload,
    TrainingWorkload,
    WeightsDtype,
    written_dict,
)

SCHEMA = 1
MAX_TOKENS_PER_SEQUENCE = 2**24
MAX_COUNT = 65536
MAX_NORM = 1e6


class Job(StrEnum):
    """What the GPUs do."""

    TRAIN = "train"
    SERVE = "serve"


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
            "workload": written_dict(self.workload),
            "parallelism": written_dict(self.parallelism),
            "hardware": self.hardware.to_dict(),
        }


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


def parse_model(value: object) -> tuple[ModelSpec, dict[str, Any]]:
    """Return a model and what it was given as, from the `model` of a plan; raises PlanError."""
    text = canonical_json("model", check_mapping("model", value))
    spec, source = _parse_model_text(text)
    if spec.trace is not None:
        # The model may have been traced anew since.
        return _parse_model_text.__wrapped__(text)
    return spec, source


def _parse_training(values: Mapping[str, Any]) -> TrainingWorkload:
    default = DEFAULTS[TrainingWorkload]
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
        checkpoint_every=check_integer(
            "workload.checkpoint_every", merged["checkpoint_every"], 1, MAX_COUNT
        ),
        loss=check_choice("workload.loss", merged["loss"], Loss),
        sync_each_micro_batch=check_boolean(
            "workload.sync_each_micro_batch", merged["sync_each_micro_batch"]
        ),
        lora_rank=check_integer("workload.lora_rank", merged["lora_rank"], 0, MAX_COUNT),
        lora_targets=check_choice("workload.lora_targets", merged["lora_targets"], LoraTargets),
        base_dtype=check_choice("workload.base_dtype", merged["base_dtype"], BaseDtype),
        frozen_layers=check_integer(
            "workload.frozen_layers", merged["frozen_layers"], 0, MAX_COUNT
        ),
        packed=check_boolean("workload.packed", merged["packed"]),
        expandable_segments=check_boolean(
            "workload.expandable_segments", merged["expandable_segments"]
        ),
        offload_optimizer=check_boolean("workload.offload_optimizer", merged["offload_optimizer"]),
        reduce_dtype=check_choice("workload.reduce_dtype", merged["reduce_dtype"], ReduceDtype),
        max_grad_norm=check_number(
            "workload.max_grad_norm", merged["max_grad_norm"], 0.0, MAX_NORM
        ),
    )


def _parse_serving(values: Mapping[str, Any]) -> ServingWorkload:
    default = DEFAULTS[ServingWorkload]
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
    default = DEFAULTS[Parallelism]
    merged = {**default, **check_mapping("parallelism", values, frozenset(default))}

    def size(name: str) -> int:
        return check_integer(f"parallelism.{name}", merged[name], 1, MAX_COUNT)

    parallelism = Parallelism(
        engine=check_choice("parallelism.engine", merged["engine"], Engine),
        zero_stage=check_integer("parallelism.zero_stage", merged["zero_stage"], 0, 3),
        world_size=size("world_size"),
        tensor_parallel=size("tensor_parallel"),
        sequence_parallel=check_boolean(
            "parallelism.sequence_parallel", merged["sequence_parallel"]
        ),
        pipeline_parallel=size("pipeline_parallel"),
        context_parallel=size("context_parallel"),
        expert_parallel=size("expert_parallel"),
    )
    check_parallelism(parallelism)
    return parallelism


def _check_served(model: ModelSpec) -> None:
    if model.trace is not None:
        sentence = (
            f"job is 'serve': {model.family} was traced for training, and what serving it keeps is "
            "known of families with templates only; plan its training."
        )
        raise PlanError("job", "serve", "train", sentence=sentence)


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
    model, source = parse_model(values["model"])
    given = check_mapping("workload", values.get("workload", {}))
    parallelism = _parse_parallelism(check_mapping("parallelism", values.get("parallelism", {})))
    workload: TrainingWorkload | ServingWorkload
    if job is Job.TRAIN:
        workload = _parse_training(given)
        check_training(model, workload, parallelism)
    else:
        _check_served(model)
        workload = _parse_serving(given)
        check_parallelism(parallelism)
        check_whole(parallelism)
        check_length(model, "workload.context_length", workload.context_length)
    return Plan(
        model=model,
        workload=workload,
        parallelism=parallelism,
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
