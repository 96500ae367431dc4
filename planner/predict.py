"""The answer to a plan: memory, verdict and speed from one call, as pages and CLI show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from planner.comparison import plan_traits
from planner.decode import decode_throughput
from planner.engines import engine_notes
from planner.error_history import Interval, interval_around
from planner.families import parameter_shapes
from planner.memory.parallel import is_split
from planner.memory.stages import step_memory
from planner.memory.training import attention_notes, routing_notes
from planner.model import ModelSpec
from planner.offload import offload_notes
from planner.plan import Plan
from planner.serving.memory import serving_memory
from planner.throughput import Throughput, training_throughput
from planner.verdict import Verdict, judge
from planner.workload import TrainingWorkload

SCHEMA = 1
PLANNER_VERSION = "0.1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner says of a plan; `memory` has the form of the prediction's JSON."""

    plan: Plan
    memory: Mapping[str, Any]
    verdict: Verdict
    throughput: Throughput
    serving: Mapping[str, Any] | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: plain numbers, no NaN."""
        return {
            "schema": SCHEMA,
            "planner_version": PLANNER_VERSION,
            "plan": self.plan.to_dict(),
            "model": describe_model(self.plan.model),
            "memory": dict(self.memory),
            "verdict": self.verdict.to_dict(),
            "throughput": self.throughput.to_dict(),
            "serving": None if self.serving is None else dict(self.serving),
            "notes": list(self.notes),
        }


def describe_model(spec: ModelSpec) -> dict[str, Any]:
    """Return every dimension of a model and the sizes that follow from it, JSON-ready."""
    return {**_described(spec), "hf_config": dict(spec.hf_config), "flags": list(spec.flags)}


@lru_cache(maxsize=64)
def _described(spec: ModelSpec) -> dict[str, Any]:
    """The numbers and names of a model's description; to be read only."""
    groups = dict.fromkeys(("embedding", "layer", "head"), 0)
    for parameter in parameter_shapes(spec):
        groups[parameter.group] += parameter.total_numel
    plain = {
        name: getattr(spec, name)
        for name in ModelSpec.__dataclass_fields__
        if name not in ("hf_config", "flags", "sliding_layers", "expert_layers", "latent", "trace")
    }
    return {
        **plain,
        "latent": asdict(spec.latent) if spec.latent else None,
        "num_expert_layers": spec.num_expert_layers,
        "num_sliding_layers": spec.num_sliding_layers,
        "query_size": spec.query_size,
        "kv_size": spec.kv_size,
        "embedding_parameters": groups["embedding"],
        "layer_parameters": groups["layer"],
        "head_parameters": groups["head"],
    }


def _length_notes(spec: ModelSpec, length: int) -> list[str]:
    if length <= spec.max_positions:
        return []
    return [f"{length:,} tokens are more than the {spec.max_positions:,} the model is made for."]


def _interval(
    plan: Plan, workload: TrainingWorkload, device_bytes: int, doubt_bytes: int
) -> Interval | None:
    """Return where the history of plans like this one puts the measurement."""
    return interval_around(device_bytes, plan_traits(plan, workload), doubt_bytes)


def _predict_training(
    plan: Plan,
    workload: TrainingWorkload,
    segment_share: float | None,
) -> Prediction:
    step = step_memory(plan.model, workload, plan.parallelism, plan.hardware, segment_share)
    memory = step.to_dict()
    speed = training_throughput(plan.model, workload, plan.parallelism, plan.hardware)
    # No plan that splits the model was measured, so history says nothing of one.
    unknown = is_split(plan.parallelism)
    doubt_bytes = step.worst.overheads.outside.doubt_bytes
    interval = None if unknown else _interval(plan, workload, memory["device_bytes"], doubt_bytes)
    return Prediction(
        plan=plan,
        memory=memory,
        verdict=judge(memory["device_bytes"], plan.hardware.visible_bytes, interval),
        throughput=speed,
        serving=None,
        notes=(
            *plan.model.flags,
            *_length_notes(plan.model, workload.sequence_length),
            *attention_notes(plan.model, workload),
            *routing_notes(plan.model),
            *engine_notes(plan.parallelism),
            *step.notes(),
            *offload_notes(plan.model, workload, plan.parallelism, plan.hardware),
            *speed.notes,
            f"Step time: {speed.source}.",
        ),
    )


def predict(plan: Plan, *, segment_share: float | None = None) -> Prediction:
    """Return the prediction for a plan; raises PlanError where the hardware lacks a needed rate.

    A training plan's allocator is replayed (see `planner.bench` for the time), unless `segment_share` gives
    its segments as a share of the allocated peak, for plans that vary one that was replayed.
    A serving plan is judged against the share of memory that `utilization` allows.
    """
    workload = plan.workload
    if isinstance(workload, TrainingWorkload):
        return _predict_training(plan, workload, segment_share)
    replicas = plan.parallelism.world_size
    memory = serving_memory(plan.model, workload, plan.hardware.visible_bytes)
    speed = decode_throughput(plan.model, workload, plan.hardware, replicas)
    return Prediction(
        plan=plan,
        memory=memory.to_dict(),
        verdict=judge(memory.device_bytes, memory.budget_bytes),
        throughput=speed,
        serving=memory.serving_dict(replicas),
        notes=(
            *plan.model.flags,
            *_length_notes(plan.model, workload.context_length),
            *speed.notes,
            f"Step time: {speed.source}.",
        ),
    )
