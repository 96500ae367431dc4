"""What few plans choose, in few words: only what is not at its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.units import format_seconds, format_share


def variant_words(values: Mapping[str, Any]) -> list[str]:
    """Return the rare training choices of widget values or of a plan's workload."""
    found = []
    if values.get("loss", "hf") != "hf":
        found.append(f"{str(values['loss']).replace('_', ' ')} loss")
    if values.get("lora_rank"):
        base = " on nf4" if values.get("base_dtype") == "nf4" else ""
        targets = " of q and v" if values.get("lora_targets") == "qv" else ""
        found.append(f"LoRA {values['lora_rank']}{targets}{base}")
    if values.get("frozen_layers"):
        found.append(f"{values['frozen_layers']} layers frozen")
    if values.get("packed"):
        found.append("packed")
    if values.get("expandable_segments"):
        found.append("expandable segments")
    if values.get("offload_optimizer"):
        found.append("optimizer offloaded")
    if values.get("reduce_dtype", "auto") != "auto":
        found.append(f"reduced in {values['reduce_dtype']}")
    if values.get("max_grad_norm"):
        found.append(f"clipped at {values['max_grad_norm']:g}")
    if not values.get("sync_each_micro_batch", True):
        found.append("reduced once per step")
    return found


def split_words(values: Mapping[str, Any]) -> str:
    """Return how each copy of the model is split, such as " x TP 2 x PP 4"; empty if it is not."""
    names = {
        "tensor_parallel": "TP",
        "pipeline_parallel": "PP",
        "context_parallel": "CP",
        "expert_parallel": "EP",
    }
    found = [f"{word} {values[key]}" for key, word in names.items() if (values.get(key) or 1) > 1]
    if values.get("sequence_parallel"):
        found.append("SP")
    return "".join(f" × {word}" for word in found)


def checkpointing_words(values: Mapping[str, Any]) -> str:
    """Return the mode of checkpointing, and of which layers if not of all."""
    every = values.get("checkpoint_every") or 1
    return f"{values['checkpointing']}{f' every {every} layers' if every > 1 else ''}"


def speed_detail(throughput: Mapping[str, Any]) -> str:
    """Return what a training step's time is made of: phases, GPU and host, and how far from ideal."""
    phases = ", ".join(
        f"{name} {format_seconds(time_s)}" for name, time_s in throughput["phases_s"].items()
    )
    share = throughput["ideal_s"] / throughput["step_time_s"]
    return (
        f"{phases}. The GPU works {format_seconds(throughput['gpu_s'])}, the host "
        f"{format_seconds(throughput['host_s'])}; at the vendor's peaks the operations would take "
        f"{format_share(share, 0)} of the step. HFU {format_share(throughput['hfu'])}."
    )


def plan_line(plan: Mapping[str, Any]) -> str:
    """Return workload and parallelism of a plan's dictionary in one short line."""
    workload, parallelism = plan["workload"], plan["parallelism"]
    if plan["job"] == "serve":
        return f"serve {workload['sequences']:,} × {workload['context_length']:,}"
    words = [
        f"{parallelism['engine']} ZeRO-{parallelism['zero_stage']} × {parallelism['world_size']}"
        + split_words(parallelism),
        f"{workload['micro_batch']:,} × {workload['sequence_length']:,}",
        workload["attention"],
        f"checkpointing {checkpointing_words(workload)}",
        *variant_words(workload),
    ]
    return ", ".join(words)
