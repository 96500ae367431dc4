"""The command that gives on the command line what the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from app import state

SERVING_OPTIONS = ("context", "sequences", "weights_dtype", "kv_dtype", "gpus")
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
    page offers beside the command.
    """
    values = state.values_of_plan(plan)
    serving = values["job"] == "serve"
    names = SERVING_OPTIONS if serving else (*TRAINING_OPTIONS, *PARALLEL_OPTIONS)
    words = ["peakmark", "plan"]
    words += ["--model", values["model"]] if is_plain_preset(plan) else ["--config", "config.json"]
    words += ["--gpu", values["gpu"]] + (["--serve"] if serving else [])
    for name in names:
        words += [f"--{name.replace('_', '-')}", str(values[name])]
    return shlex.join(words)


def is_plain_preset(plan: Mapping[str, Any]) -> bool:
    """Say whether a plan's model is a preset without edited numbers."""
    return "preset" in plan["model"] and not plan["model"].get("overrides")


def limits(plan: Mapping[str, Any]) -> list[str]:
    """Return what the command cannot carry of a plan, as sentences."""
    found = []
    if "preset" not in plan["hardware"]:
        found.append("The command line knows GPU presets only: put one in place of custom.")
    if plan["workload"].get("utilization", state.DEFAULTS["utilization"]) != 0.9:
        found.append("The command line plans serving with a usable share of 0.9.")
    return found
