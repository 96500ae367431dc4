"""What the person chose: the keys of the widgets (which are the names in the URL), their defaults,
and the way from them to a plan and back. Pure: the pages hand in the values."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from math import isfinite
from typing import Any

from planner.units import GIB_BYTES

# The name in the URL is the option's name on the command line.
DEFAULTS: Mapping[str, Any] = {
    "job": "train",
    "source": "preset",
    "model": "meta-llama/Llama-3.1-8B",
    "hub": "",
    "seq": 4096,
    "micro_batch": 1,
    "grad_accumulation": 1,
    "optimizer": "adamw_fused",
    "precision": "mixed",
    "attention": "sdpa",
    "checkpointing": "none",
    "checkpoint_every": 1,
    "loss": "hf",
    "sync_each_micro_batch": True,
    "lora_rank": 0,
    "lora_targets": "all_linear",
    "base_dtype": "as_precision",
    "frozen_layers": 0,
    "packed": False,
    "expandable_segments": False,
    "offload_optimizer": False,
    "reduce_dtype": "auto",
    "max_grad_norm": 0.0,
    "engine": "peakmark",
    "zero": 3,
    "gpus": 8,
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "expert_parallel": 1,
    "context": 8192,
    "sequences": 8,
    "weights_dtype": "bf16",
    "kv_dtype": "bf16",
    "utilization": 0.9,
    "gpu": "h200-sxm5-141gb",
    "gpu_gib": 80.0,
    "gpu_tb_s": 3.35,
    "gpu_tflop_s": 989.0,
    "gpu_link_gb_s": 450.0,
    "unit": "GiB",
}
# What few plans need: folded away on the page, left out of the command where it is the default.
RARE_TRAINING = (
    "checkpoint_every",
    "loss",
    "sync_each_micro_batch",
    "lora_rank",
    "lora_targets",
    "base_dtype",
    "frozen_layers",
    "packed",
    "expandable_segments",
    "offload_optimizer",
    "reduce_dtype",
    "max_grad_norm",
)
MODEL_PARALLEL = (
    "tensor_parallel",
    "sequence_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
)
# Dimensions of the model that can be edited, by their names in config.json.
DIMENSIONS: Mapping[str, str] = {
    "num_hidden_layers": "Layers",
    "hidden_size": "Hidden size",
    "intermediate_size": "MLP inner size",
    "num_attention_heads": "Attention heads",
    "num_key_value_heads": "Key-value heads",
    "head_dim": "Head size",
    "vocab_size": "Vocabulary",
    "max_position_embeddings": "Longest position",
    "sliding_window": "Sliding window",
    "num_local_experts": "Experts",
    "num_experts_per_tok": "Experts per token",
}
TIE_KEY = "tie_word_embeddings"
TIE_CHOICES = ("as in the config", "tied", "untied")
CUSTOM_GPU = "custom"
ATTACHED_PREFIX = "attached-"
CONFIG_KEY = "config"
MAX_CONFIG_URL_CHARACTERS = 3000
MAX_CONFIG_BYTES = 1_000_000


def values_from(state: Mapping[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
    """Return every widget's value: what it holds now, else what the URL says, else the default."""
    values = {key: _value(key, default, state, query) for key, default in DEFAULTS.items()}
    for key in DIMENSIONS:
        values[key] = _value(key, None, state, query)
    values[TIE_KEY] = _value(TIE_KEY, TIE_CHOICES[0], state, query)
    return values


def _value(key: str, default: Any, state: Mapping[str, Any], query: Mapping[str, str]) -> Any:
    if key in state:
        return state[key]
    if key not in query:
        return default
    kind = int if key in DIMENSIONS else type(default)
    try:
        value = read_flag(query[key]) if kind is bool else kind(query[key])
    except (ValueError, OverflowError):
        return default
    # No widget holds NaN or infinity: it shows its default.
    return default if kind is float and not isfinite(value) else value


def read_flag(text: str) -> bool:
    """Return what a switch is in the URL, "true" or "false"; raises ValueError for the rest."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def plan_mapping(
    values: Mapping[str, Any], model: Mapping[str, Any], hardware: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the plan as a dictionary, unchecked; `model` and `hardware` are its own parts."""
    overrides = {key: values[key] for key in DIMENSIONS if values.get(key) is not None}
    if values.get(TIE_KEY, TIE_CHOICES[0]) != TIE_CHOICES[0]:
        overrides[TIE_KEY] = values[TIE_KEY] == "tied"
    return {
        "schema": 1,
        "job": values["job"],
        "model": {**model, "overrides": overrides} if overrides else dict(model),
        "workload": _serving(values) if values["job"] == "serve" else _training(values),
        "parallelism": {
            "engine": values["engine"],
            "zero_stage": values["zero"],
            "world_size": values["gpus"],
            **({} if values["job"] == "serve" else {key: values[key] for key in MODEL_PARALLEL}),
        },
        "hardware": dict(hardware),
    }


def _training(values: Mapping[str, Any]) -> dict[str, Any]:
    same = ("micro_batch", "grad_accumulation", "optimizer", "precision", "attention")
    return {
        "sequence_length": values["seq"],
        **{key: values[key] for key in same},
        "checkpointing": values["checkpointing"],
        **{key: values[key] for key in RARE_TRAINING},
    }


def _serving(values: Mapping[str, Any]) -> dict[str, Any]:
    same = ("sequences", "weights_dtype", "kv_dtype", "utilization")
    return {"context_length": values["context"], **{key: values[key] for key in same}}


def custom_hardware(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the custom GPU's part of a plan; numbers that are missing stay None."""
    return {
        "custom": {
            "name": "custom GPU",
            "visible_bytes": _scaled(values["gpu_gib"], GIB_BYTES),
            "mem_bandwidth_bytes_s": _scaled(values["gpu_tb_s"], 10**12),
            "peak_dense_flop_s": {"bf16": _scaled(values["gpu_tflop_s"], 10**12)},
            "interconnect_bytes_s": _scaled(values["gpu_link_gb_s"], 10**9),
        }
    }


def _scaled(number: float | None, factor: int) -> int | float | None:
    try:
        return None if number is None else round(number * factor)
    except (ValueError, OverflowError):
        return number


def values_of_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widget values that show `plan`; the way back of `plan_mapping`.

    A configuration comes back under "config"; hardware that is no preset as a custom GPU.
    """
    workload, parallelism = plan["workload"], plan["parallelism"]
    renamed = {"sequence_length": "seq", "context_length": "context"}
    values = {"job": plan["job"], **{renamed.get(key, key): workload[key] for key in workload}}
    values |= {
        "engine": parallelism["engine"],
        "zero": parallelism["zero_stage"],
        "gpus": parallelism["world_size"],
    }
    # A plan does not write these where they are at their default.
    rare = {**workload, **parallelism}
    values |= {key: rare.get(key, DEFAULTS[key]) for key in (*RARE_TRAINING, *MODEL_PARALLEL)}
    return values | _model_values(plan["model"]) | _hardware_values(plan["hardware"])


def _model_values(model: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(model.get("overrides") or {})
    if TIE_KEY in values:
        values[TIE_KEY] = "tied" if values[TIE_KEY] else "untied"
    if "preset" in model:
        return {**values, "source": "preset", "model": model["preset"]}
    return {**values, "source": CONFIG_KEY, CONFIG_KEY: model["config"]}


def _hardware_values(hardware: Mapping[str, Any]) -> dict[str, Any]:
    if "preset" in hardware:
        return {"gpu": hardware["preset"]}
    custom = hardware[CUSTOM_GPU]
    flops = (custom.get("peak_dense_flop_s") or {}).get("bf16")
    return {
        "gpu": CUSTOM_GPU,
        "gpu_gib": custom["visible_bytes"] / GIB_BYTES,
        "gpu_tb_s": (custom.get("mem_bandwidth_bytes_s") or 0) / 10**12,
        "gpu_tflop_s": (flops or 0) / 10**12,
        "gpu_link_gb_s": (custom.get("interconnect_bytes_s") or 0) / 10**9,
    }


def query_of_plan(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the URL parameters that open `plan` on the Plan page; defaults are left out."""
    values = values_of_plan(plan)
    config = values.pop(CONFIG_KEY, None)
    query = query_of_values(values)
    packed = pack_config(config) if config is not None else None
    return query | {CONFIG_KEY: packed} if packed else query


def query_of_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the URL parameters of widget values; defaults are left out."""
    known = {**DEFAULTS, **dict.fromkeys(DIMENSIONS), TIE_KEY: TIE_CHOICES[0]}
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in values.items()
        if key in known and value != known[key]
    }


def pack_config(config: Mapping[str, Any]) -> str | None:
    """Return a config.json as compressed text for the URL; None when it is too long for one."""
    plain = json.dumps(config, separators=(",", ":"), sort_keys=True)
    packed = base64.urlsafe_b64encode(zlib.compress(plain.encode(), 9)).decode().rstrip("=")
    return packed if len(packed) <= MAX_CONFIG_URL_CHARACTERS else None


def unpack_config(packed: str) -> str | None:
    """Return the text of a config packed by `pack_config`; None when the URL was damaged."""
    if len(packed) > MAX_CONFIG_URL_CHARACTERS:
        return None
    try:
        data = base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4))
        inflater = zlib.decompressobj()
        plain = inflater.decompress(data, MAX_CONFIG_BYTES)
        return plain.decode() if inflater.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
