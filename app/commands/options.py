"""The options that describe a plan, and the way from them to a checked plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.output import InputError
from app.state import DEFAULTS

if TYPE_CHECKING:
    from planner.plan import Plan


def _option(text: str, kind: type = str, default: str | None = None) -> Any:
    shown = default if default is not None else False
    return Annotated[kind | None, typer.Option(help=text, show_default=shown)]


def _options(rows: Mapping[str, tuple[str, type]]) -> Mapping[str, Any]:
    """Return options whose help names the default of the Plan page."""
    return {
        name: _option(text, kind, str(DEFAULTS[name]) if name in DEFAULTS else None)
        for name, (text, kind) in rows.items()
    }


# By the name that app.state gives the same choice in the URL.
TARGET_OPTIONS: Mapping[str, Any] = _options(
    {
        "model": ("Model: hub id or short name, such as llama-3.1-8b.", str),
        "config": ("A Hugging Face config.json, instead of --model.", Path),
        "gpu": ("GPU: preset id or short name, such as h200, or 'attached'.", str),
        "engine": ("ZeRO engine: peakmark or fsdp2.", str),
        "grad_accumulation": ("Micro-batches per optimizer step.", int),
        "optimizer": ("adamw_fused, adamw_foreach, adamw_loop or sgd.", str),
        "precision": ("mixed, bf16, fp32 or autocast.", str),
        "attention": ("eager, sdpa or triton.", str),
        "checkpointing": ("none or full.", str),
    }
)
SIZE_OPTIONS: Mapping[str, Any] = _options(
    {
        "gpus": ("World size: number of GPUs.", int),
        "zero": ("ZeRO stage, 0 to 3.", int),
        "micro_batch": ("Sequences per GPU and micro-batch.", int),
        "seq": ("Tokens per sequence.", int),
    }
)
SERVE_OPTIONS: Mapping[str, Any] = {
    "serve": Annotated[bool, typer.Option("--serve", help="Plan serving instead of training.")],
    **_options(
        {
            "context": ("Serving: tokens per sequence.", int),
            "sequences": ("Serving: sequences at once.", int),
            "weights_dtype": ("Serving: bf16, fp16, fp32, fp8, int8 or int4.", str),
            "kv_dtype": ("Serving: bf16, fp16, fp32, fp8 or int8.", str),
        }
    ),
}
# World size is also the number of replicas when serving.
TRAINING_ONLY = (set(TARGET_OPTIONS) | set(SIZE_OPTIONS)) - {"model", "config", "gpu", "gpus"}


def with_options(*groups: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of `groups`; it receives them as one mapping `chosen`."""
    options = {name: annotation for group in groups for name, annotation in group.items()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [parameter for parameter in parameters if parameter.name != "chosen"]

        def call(**arguments: Any) -> Any:
            chosen = {name: arguments.pop(name) for name in options}
            return command(chosen=chosen, **arguments)

        call.__doc__ = command.__doc__
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=False if name == "serve" else None,
                    annotation=annotation,
                )
                for name, annotation in options.items()
            ]
            + [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        )
        call.__annotations__ = {
            **options,
            **{parameter.name: parameter.annotation for parameter in own},
        }
        return call

    return decorate


def plan_from(chosen: Mapping[str, Any]) -> Plan:
    """Return the checked plan that the options describe; raises PlanError or InputError.

    An option that was not given has the default of the Plan page.
    """
    from app.state import plan_mapping
    from planner.plan import parse_plan

    given = {name: value for name, value in chosen.items() if value is not None}
    _refuse_contradictions(given)
    values = {**DEFAULTS, **given, "job": "serve" if given.get("serve") else "train"}
    return parse_plan(plan_mapping(values, model_part(values), hardware_part(values["gpu"])))


def _config_name(path: Path) -> str:
    """Name a configuration by its file, or by its folder where the file is a plain config.json."""
    resolved = path.resolve()
    if path.is_dir():
        return resolved.name or "custom model"
    is_plain = resolved.name == "config.json"
    return (resolved.parent.name if is_plain else resolved.stem) or "custom model"


def _refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Raise InputError for an option that would have no effect beside the others."""
    if "model" in given and "config" in given:
        sentence = "--model and --config both name a model: give one of them."
        raise InputError("config", str(given["config"]), "without --model", sentence)
    serving = bool(given.get("serve"))
    unused = TRAINING_ONLY if serving else set(SERVE_OPTIONS) - {"serve"}
    for name in (name for name in given if name in unused):
        job, allowed = ("training", "without --serve") if serving else ("serving", "with --serve")
        sentence = f"--{name.replace('_', '-')} is an option of {job}: use it {allowed}."
        raise InputError(name, given[name], allowed, sentence)


def model_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's model: a preset, a config.json, or a configuration from the hub."""
    if values.get("config") is not None:
        from planner.config_input import read_config_file

        path = Path(values["config"])
        return {"config": read_config_file(path), "name": _config_name(path)}
    name = values["model"]
    if is_preset(name):
        return {"preset": name}
    from planner.hub import fetch_hub_config

    return {"config": fetch_hub_config(name), "name": name}


def is_preset(name: str) -> bool:
    """Whether a model is known by this name; only an unknown name with a slash is a hub id."""
    from planner.errors import PlanError
    from planner.presets import resolve_preset

    if "/" not in name:
        return True
    try:
        resolve_preset(name)
    except PlanError:
        return False
    return True


def hardware_part(name: str) -> dict[str, Any]:
    """Return a plan's hardware: a preset, or the first attached GPU for 'attached'."""
    if name != "attached":
        return {"preset": name}
    from planner.attached import attached_gpus

    attached = attached_gpus()
    if not attached.gpus:
        sentence = (
            f"No GPU is attached: name a preset, such as h200. {attached.reason or ''}".strip()
        )
        raise InputError("gpu", name, "a GPU preset", sentence)
    gpu = attached.gpus[0].to_gpu()
    if gpu is None:
        sentence = f"The attached {attached.gpus[0].name} is no known preset: name a similar one."
        raise InputError("gpu", name, "a GPU preset", sentence)
    return gpu.to_dict()
