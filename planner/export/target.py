"""Targets of an export, the files it makes, and what of a plan a target leaves to the script."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.errors import PlanError
from planner.plan import Plan
from planner.workload import (
    Parallelism,
    ServingWorkload,
    TrainingWorkload,
    flat_dict,
)


class Target(StrEnum):
    """A program or library that a plan can be written for."""

    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"
    FSDP2 = "fsdp2"
    TORCHTITAN = "torchtitan"
    TORCHRUN = "torchrun"
    SBATCH = "sbatch"
    VLLM = "vllm"


SERVES = frozenset((Target.VLLM,))
# How a setting that a file cannot hold is made in a training script.
HINTS: dict[str, str] = {
    "attention": "attn_implementation when the model is loaded",
    "checkpointing": "model.gradient_checkpointing_enable(...)",
    "checkpoint_every": "which layers have gradient_checkpointing on",
    "optimizer": "the optimizer that the script makes",
    "precision": "the dtype that the model is loaded in",
    "loss": "how the script computes the loss",
    "lora_rank": "peft.LoraConfig(r=...)",
    "lora_targets": "peft.LoraConfig(target_modules=...)",
    "base_dtype": "BitsAndBytesConfig(load_in_4bit=True)",
    "frozen_layers": "requires_grad_(False) on the embedding and these layers",
    "packed": "position_ids that begin again with each document",
    "sync_each_micro_batch": "model.no_sync() or set_requires_gradient_sync(False)",
    "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "offload_optimizer": "an optimizer that steps on the CPU",
    "reduce_dtype": "the dtype that gradients are reduced in",
    "max_grad_norm": "clip_grad_norm_ before each step",
    "grad_accumulation": "micro-batches between two steps",
}
# What no other program has, and what computes the same there.
_VALUE_HINTS = {
    ("optimizer", "adamw_triton"): "Peakmark's own kernel; torch.optim.AdamW(fused=True) elsewhere",
}
_PARALLEL_DEFAULT = flat_dict(Parallelism())
# What a plan always says; everything else counts where it is not at its default.
_ALWAYS = frozenset(
    (
        *("sequence_length", "micro_batch", "optimizer", "precision", "attention"),
        *("engine", "zero_stage", "world_size"),
        *("context_length", "sequences", "weights_dtype", "kv_dtype", "utilization"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A file's name and text, and the language it is highlighted in."""

    name: str
    text: str
    language: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The files of an export, and a sentence for everything that they do not say."""

    target: Target
    files: tuple[ExportFile, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "target": str(self.target),
            "files": [{"name": one.name, "text": one.text} for one in self.files],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a writer made: files, the plan's settings that they hold, and notes of its own."""

    files: tuple[ExportFile, ...]
    holds: frozenset[str]
    notes: tuple[str, ...] = ()


def settings(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan that an export must hold or name: by field, as text or number."""
    default = flat_dict(type(plan.workload)()) | _PARALLEL_DEFAULT
    every = flat_dict(plan.workload) | flat_dict(plan.parallelism)
    if isinstance(plan.workload, ServingWorkload):
        # The planner reads replicas alone of a serving plan's parallelism.
        every = {n: v for n, v in every.items() if n in flat_dict(plan.workload)}
        every["world_size"] = plan.parallelism.world_size
    elif not plan.workload.lora_rank:
        every.pop("lora_targets")
    return {n: v for n, v in every.items() if n in _ALWAYS or v != default[n]}


def finished(plan: Plan, target: Target, draft: Draft) -> Export:
    """Return a draft as an export, with a note of every setting that its files do not hold."""
    left = {name: value for name, value in settings(plan).items() if name not in draft.holds}
    notes = list(draft.notes)
    if left:
        place = "to the server" if target in SERVES else "in the training script"
        notes.append(f"Not in {_names(draft)}, set it {place}: {_listed(left)}.")
    return Export(target=target, files=draft.files, notes=tuple(notes))


def _names(draft: Draft) -> str:
    return " and ".join(one.name for one in draft.files)


def _listed(left: dict[str, Any]) -> str:
    return "; ".join(f"{name} {value}{_hint(name, value)}" for name, value in left.items())


def _hint(name: str, value: Any) -> str:
    hint = _VALUE_HINTS.get((name, str(value))) or HINTS.get(name)
    return f" ({hint})" if hint else ""


def training(plan: Plan, target: Target) -> TrainingWorkload:
    """Return a training plan's workload; raises PlanError for a serving plan."""
    if isinstance(plan.workload, TrainingWorkload):
        return plan.workload
    sentence = (
        f"export.to is '{target}': it trains, and the plan serves; export a serving plan to vllm."
    )
    raise PlanError("export.to", str(target), "vllm", sentence=sentence)


def refuse(target: Target, field: str, value: object, why: str) -> PlanError:
    """Return the error of a setting that a target cannot have; `why` says what to do instead."""
    sentence = f"export.to is '{target}' and {field} is {value!r}: {why}."
    return PlanError(field, value, "one that the target has", sentence=sentence)


def refuse_splits(plan: Plan, target: Target, names: Iterable[str] = ()) -> None:
    """Raise PlanError where the plan splits the model in a way that is not among `names`."""
    known = set(names)
    for name in _SPLITS:
        value = getattr(plan.parallelism, name)
        if value not in (1, False) and name not in known:
            why = "its configuration cannot split the model so; export to torchtitan"
            if target is Target.TORCHTITAN:
                why = "torchtitan has no such split"
            raise refuse(target, f"parallelism.{name}", value, why)


_SPLITS = (
    *("tensor_parallel", "sequence_parallel", "pipeline_parallel", "context_parallel"),
    "expert_parallel",
)


def gpus_of(plan: Plan) -> int:
    """Return how many GPUs a training plan takes: its ranks times the GPUs of each."""
    spread = plan.parallelism
    return (
        spread.world_size
        * spread.tensor_parallel
        * spread.pipeline_parallel
        * spread.context_parallel
    )


def model_name(plan: Plan) -> str | None:
    """Return the hub id of a plan's model, None for one of its own configuration or edits."""
    source = plan.model_source
    return None if source.get("overrides") else source.get("preset")


def plain_name(plan: Plan) -> str:
    """Return the model's name in letters, digits, dots and dashes, for names of files and jobs."""
    name = str(plan.model_source.get("preset") or plan.model_source.get("name") or "model")
    letters = [
        c if c.isascii() and (c.isalnum() or c in "._") else "-" for c in name.split("/")[-1]
    ]
    return "".join(letters).strip("-.").lower()[:60] or "model"
