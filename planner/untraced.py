"""A plan whose training step has not been traced: which choice to change, and to what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import combinations
from typing import Any

from planner.errors import PlanError
from planner.memory.kinds import layer_kinds
from planner.model import ModelSpec
from planner.traced import traced_model
from planner.workload import (
    Attention,
    BaseDtype,
    Checkpointing,
    Loss,
    Precision,
    TrainingWorkload,
    flat_dict,
)

Works = Callable[[TrainingWorkload], bool]

# Above it not every number of layers is tried, or a refusal would take seconds.
_MAX_TRIED_LAYERS = 64


def untraced(model: ModelSpec, workload: TrainingWorkload, works: Works) -> PlanError:
    """Return the refusal of a workload that has not been traced.

    It names a choice whose change makes the workload one that `works`: one that is not at its
    default, if there is one; several together, if it takes several; else the model.
    """
    allowed_of = {
        name: _values_that_work(workload, name, values, works)
        for name, values in _choices(model).items()
    }
    changed = _changed_fields(workload)
    helpful = [name for name, values in allowed_of.items() if values]
    helpful.sort(key=lambda name: name not in changed)
    if helpful:
        return _refusal(model, workload, {name: allowed_of[name] for name in helpful})
    default = TrainingWorkload()
    for count in range(2, len(changed) + 1):
        for names in combinations(changed, count):
            reset = {name: getattr(default, name) for name in names}
            if works(replace(workload, **reset)):
                return _refusal_of_several(model, workload, reset)
    return _refusal_of_model(model, workload)


def _choices(model: ModelSpec) -> Mapping[str, Iterable[Any]]:
    tried = model.num_layers if model.num_layers <= _MAX_TRIED_LAYERS else 1
    return {
        "lora_rank": (0,),
        "base_dtype": (BaseDtype.AS_PRECISION,),
        "packed": (False,),
        "frozen_layers": range(tried),
        "checkpoint_every": range(1, tried + 1),
        "loss": Loss,
        "checkpointing": Checkpointing,
        "attention": Attention,
        "precision": Precision,
    }


def _changed_fields(workload: TrainingWorkload) -> list[str]:
    default = flat_dict(TrainingWorkload())
    names = ("lora_rank", "base_dtype", "packed", "frozen_layers", "checkpoint_every", "loss")
    return [
        name
        for name in (*names, "checkpointing", "attention", "precision")
        if flat_dict(workload)[name] != default[name]
    ]


def _values_that_work(
    workload: TrainingWorkload, name: str, values: Iterable[Any], works: Works
) -> list[Any]:
    is_freezing = name in ("frozen_layers", "checkpoint_every")
    if is_freezing and name not in _changed_fields(workload):
        return []
    others = (value for value in values if value != getattr(workload, name))
    return [value for value in others if works(replace(workload, **{name: value}))]


def _refusal(
    model: ModelSpec, workload: TrainingWorkload, allowed_of: Mapping[str, Sequence[Any]]
) -> PlanError:
    (name, values), *others = allowed_of.items()
    value, allowed = _shown(getattr(workload, name)), _words(values)
    also = "".join(f", or workload.{other} {_words(found)}" for other, found in others)
    sentence = (
        f"workload.{name} is {value!r}: a training step of {model.family} with this and the other "
        f"choices has not been traced; use {allowed}{also}{_or_trace_it(model, name)}."
    )
    return PlanError(f"workload.{name}", value, allowed, sentence=sentence)


def _or_trace_it(model: ModelSpec, name: str) -> str:
    """What else can be done where the model was traced by itself."""
    if model.trace is None or name not in ("attention", "precision", "checkpointing"):
        return ""
    return f", or run `peakmark trace` with --{name}"


def _refusal_of_several(
    model: ModelSpec, workload: TrainingWorkload, reset: Mapping[str, Any]
) -> PlanError:
    held = " and ".join(f"workload.{name} is {_shown(getattr(workload, name))!r}" for name in reset)
    allowed = " and ".join(f"{name} {value}" for name, value in reset.items())
    sentence = (
        f"{held}: a training step of {model.family} with these together has not been traced; use "
        f"{allowed}."
    )
    first = next(iter(reset))
    value = _shown(getattr(workload, first))
    return PlanError(f"workload.{first}", value, allowed, sentence=sentence)


def _refusal_of_model(model: ModelSpec, workload: TrainingWorkload) -> PlanError:
    if model.trace is not None:
        return _refusal_of_length(model, workload)
    kinds = ", ".join(dict.fromkeys(layer_kinds(model, workload)))
    sentence = (
        f"model is '{model.name}': a training step of {model.family} with {model.num_layers} "
        f"layers in its order of kinds ({kinds}) has not been traced; use another number or order "
        "of layers, or plan it for serving."
    )
    return PlanError("model", model.name, "a traced order of layers", sentence=sentence)


def _refusal_of_length(model: ModelSpec, workload: TrainingWorkload) -> PlanError:
    name, length = "workload.sequence_length", workload.sequence_length
    found = {(v.first, v.last) for v in traced_model(model).file.variants}
    allowed = " or ".join(f"{first} to {last}" for first, last in sorted(found))
    sentence = (
        f"{name} is {length}: {model.family} was traced for other lengths; use {allowed}, or run "
        "`peakmark trace` for its other choices."
    )
    return PlanError(name, length, allowed, sentence=sentence)


def _shown(value: Any) -> Any:
    return str(value) if isinstance(value, StrEnum) else value


def _words(values: Sequence[Any]) -> str:
    """Join choices by "or"; consecutive whole numbers become a range."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and isinstance(value, int) and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(value) for value in run]
    *first, last = texts
    return f"{', '.join(first)} or {last}" if first else last
