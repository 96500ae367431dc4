"""The options that describe a plan, and the way from them to a checked plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.json_file import read_json_file
from app.commands.output import InputError
from app.state import CUSTOM_GPU, DEFAULTS

if TYPE_CHECKING:
    from planner.errors import PlanError
    from planner.plan import Plan


def _option(text: str, kind: type = str, default: str | None = None) -> Any:
    shown = default if default is not None else False
    return Annotated[kind | None, typer.Option(help=text, show_default=shown)]


def _options(rows: Mapping[str, tuple[str, type]]) -> dict[str, Any]:
    """Return options whose help names the default of the Plan page."""
    return {
        name: _option(text, kind, str(DEFAULTS[name]) if name in DEFAULTS else None)
        for name, (text, kind) in rows.items()
    }


CUSTOM_GPU_OPTIONS: Mapping[str, Any] = {
    "gpu_gib": _option("Custom GPU: memory that CUDA shows, in GiB.", float),
    "gpu_tb_s": _option("Custom GPU: memory bandwidth in TB/s.", float),
    "gpu_tflop_s": _option("Custom GPU: dense bf16 rate in TFLOP/s.", float),
    "gpu_link_gb_s": _option("Custom GPU: link to the other GPUs, GB/s each way.", float),
}
# By the name that app.state gives the same choice in the URL.
TARGET_OPTIONS: Mapping[str, Any] = _options(
    {
        "model": ("Model: hub id or short name, such as llama-3.1-8b.", str),
        "config": ("A Hugging Face config.json, instead of --model.", Path),
        "gpu": (
            "GPU: preset id or short name, such as h200; 'attached'; 'custom', which takes "
            "--gpu-gib, --gpu-tb-s, --gpu-tflop-s and --gpu-link-gb-s; or a JSON file of a "
            "plan's custom GPU.",
            str,
        ),
        "engine": ("peakmark, fsdp2, ddp, zero_redundancy or deepspeed.", str),
        "grad_accumulation": ("Micro-batches per optimizer step.", int),
        "optimizer": (
            "adamw_fused, adamw_foreach, adamw_loop, adamw_triton, adamw_8bit, sgd, adafactor or muon.",
            str,
        ),
        "precision": ("mixed, bf16, fp32 or autocast.", str),
        "attention": ("eager, sdpa or triton.", str),
        "checkpointing": ("none, full or selective.", str),
        "checkpoint_every": ("Checkpoint layers 0, k, 2k, ... only.", int),
        "loss": ("hf, chunked or fused_linear.", str),
        "sync_each_micro_batch": ("Reduce gradients after every micro-batch.", bool),
        "lora_rank": ("Rank of LoRA adapters on frozen weights; 0: none.", int),
        "lora_targets": ("What carries adapters: qv or all_linear.", str),
        "base_dtype": ("Frozen weights below adapters: as_precision or nf4.", str),
        "frozen_layers": ("Freeze the embedding and the first k layers.", int),
        "packed": ("Two documents per row, each blind to the other.", bool),
        "expandable_segments": ("The allocator's expandable segments.", bool),
        "offload_optimizer": ("Keep and step the optimizer in host memory.", bool),
        "reduce_dtype": ("Gradients are reduced in: auto, bf16 or fp32.", str),
        "max_grad_norm": ("Clip gradients to this norm over all ranks; 0: never.", float),
        "tensor_parallel": ("GPUs that split every layer's matrices.", int),
        "sequence_parallel": ("Tensor-parallel GPUs split the sequence too.", bool),
        "pipeline_parallel": ("Stages that split the layers.", int),
        "context_parallel": ("GPUs that split each sequence.", int),
        "expert_parallel": ("Data-parallel ranks that split the experts.", int),
    }
) | dict(CUSTOM_GPU_OPTIONS)
SIZE_OPTIONS: Mapping[str, Any] = _options(
    {
        "gpus": ("Data-parallel ranks: GPUs, if each copy of the model is on one.", int),
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
            "weights_dtype": ("Serving: bf16, fp16, fp32, fp8, int8, int4 or mxfp4.", str),
            "kv_dtype": ("Serving: bf16, fp16, fp32, fp8 or int8.", str),
            "utilization": ("Serving: share of the GPU that it may take, 0.01 to 1.", float),
        }
    ),
}
# World size is also the number of replicas when serving.
CUSTOM_NUMBERS = tuple(CUSTOM_GPU_OPTIONS)
_GPU_OPTION_OF_FIELD: Mapping[str, str] = {
    "visible_bytes": "gpu_gib",
    "mem_bandwidth_bytes_s": "gpu_tb_s",
    "peak_dense_flop_s.bf16": "gpu_tflop_s",
    "interconnect_bytes_s": "gpu_link_gb_s",
}
TRAINING_ONLY = (set(TARGET_OPTIONS) | set(SIZE_OPTIONS)) - {
    *("model", "config", "gpu", "gpus"),
    *CUSTOM_NUMBERS,
}


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

    Its GPU has the calibration that was made on this machine, if there is one. An option that was not given has the default of the Plan page.
    """
    from app.own_calibration import timed_here
    from app.state import plan_mapping
    from planner.errors import PlanError
    from planner.plan import parse_plan

    given = {name: value for name, value in chosen.items() if value is not None}
    _refuse_contradictions(given)
    values = {**DEFAULTS, **given, "job": "serve" if given.get("serve") else "train"}
    mapping = plan_mapping(values, model_part(values), hardware_part(given))
    try:
        return timed_here(parse_plan(mapping))
    except PlanError as error:
        raise _told_by_option(error, given) from None


def _told_by_option(error: PlanError, given: Mapping[str, Any]) -> Exception:
    """Name the option where it has another unit than the plan's field, which nobody typed."""
    name = _GPU_OPTION_OF_FIELD.get(error.field.removeprefix("hardware.custom."))
    if name is None or name not in given:
        return error
    sentence = f"--{name.replace('_', '-')} is {given[name]:g}, so {error}"
    return InputError(name, given[name], error.allowed, sentence)


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
    if "lora_targets" in given and not given.get("lora_rank"):
        sentence = f"--lora-targets is {given['lora_targets']}: it says where adapters are, so it "
        sentence += "needs --lora-rank above 0."
        raise InputError("lora_targets", given["lora_targets"], "with --lora-rank", sentence)
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


def hardware_part(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's hardware: a preset, custom numbers, a file's, or the first attached GPU."""
    numbers = [name for name in CUSTOM_NUMBERS if name in given]
    name = str(given.get("gpu", CUSTOM_GPU if numbers else DEFAULTS["gpu"]))
    if name == CUSTOM_GPU:
        return _custom_part(given)
    if numbers:
        option = f"--{numbers[0].replace('_', '-')}"
        sentence = f"{option} describes a custom GPU: give it without --gpu, or with --gpu custom."
        raise InputError(numbers[0], given[numbers[0]], "with --gpu custom", sentence)
    if name.endswith(".json"):
        return _gpu_of_file(Path(name))
    return _attached_part() if name == "attached" else {"preset": name}


def _custom_part(given: Mapping[str, Any]) -> dict[str, Any]:
    from app.state import custom_hardware

    for name in CUSTOM_NUMBERS[:-1]:
        if name not in given:
            option = f"--{name.replace('_', '-')}"
            sentence = f"{option} is missing: a custom GPU needs memory, bandwidth and bf16 rate."
            raise InputError(name, None, "a number", sentence)
    return custom_hardware({**dict.fromkeys(CUSTOM_NUMBERS), **given})


def _gpu_of_file(path: Path) -> dict[str, Any]:
    """Read {"custom": {...}} as a plan's JSON has it, or the numbers alone."""
    said = f"--gpu {path} cannot be read as JSON"
    found = read_json_file("gpu", path, said, "a JSON file of a GPU")
    return found if isinstance(found, dict) and "custom" in found else {"custom": found}


def _attached_part() -> dict[str, Any]:
    from planner.attached import attached_gpus

    attached = attached_gpus()
    if not attached.gpus:
        sentence = (
            f"No GPU is attached: name a preset, such as h200. {attached.reason or ''}".strip()
        )
        raise InputError("gpu", "attached", "a GPU preset", sentence)
    gpu = attached.gpus[0].to_gpu()
    if gpu is None:
        sentence = f"The attached {attached.gpus[0].name} is no known preset: name a similar one."
        raise InputError("gpu", "attached", "a GPU preset", sentence)
    return gpu.to_dict()
