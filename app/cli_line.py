"""The command that gives on the command line what the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from app import state

SERVING_OPTIONS = ("context", "sequences", "weights_dtype", "kv_dtype", "gpus")
RARE_SERVING_OPTIONS = ("utilization",)
CUSTOM_NUMBERS = ("gpu_gib", "gpu_tb_s", "gpu_tflop_s", "gpu_link_gb_s")
PARALLEL_OPTIONS = ("engine", "zero", "gpus")
TRAINING_OPTIONS = (
    "seq",
    "micro_batch",
    "grad_accumulation",
    "optimizer",
    "precision",
    "attention",
    "checkpointing",
)


def cli_line(plan: Mapping[str, Any]) -> str:
    """Return the `peakmark plan` command of a plan's dictionary.

    A model that is not a plain preset is given as `--config config.json`, the file which the
    page offers beside the command. Rare choices are named where they are not at their default.
    """
    values = state.values_of_plan(plan)
    serving = values["job"] == "serve"
    names = SERVING_OPTIONS if serving else (*TRAINING_OPTIONS, *PARALLEL_OPTIONS)
    words = ["peakmark", "plan"]
    words += ["--model", values["model"]] if is_plain_preset(plan) else ["--config", "config.json"]
    words += ["--gpu", values["gpu"]]
    if values["gpu"] == state.CUSTOM_GPU:
        words += [part for name in CUSTOM_NUMBERS for part in _option(name, values[name])]
    words += ["--serve"] if serving else []
    words += [part for name in names for part in _option(name, values[name])]
    rare = RARE_SERVING_OPTIONS if serving else (*state.RARE_TRAINING, *state.MODEL_PARALLEL)
    words += [
        part
        for name in rare
        if values[name] != state.DEFAULTS[name] and (name != "lora_targets" or values["lora_rank"])
        for part in _option(name, values[name])
    ]
    return shlex.join(words)


def _option(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", f"{value:g}" if isinstance(value, float) else str(value)]


def is_plain_preset(plan: Mapping[str, Any]) -> bool:
    """Say whether a plan's model is a preset without edited numbers."""
    return "preset" in plan["model"] and not plan["model"].get("overrides")
