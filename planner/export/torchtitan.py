"""torchtitan: a TOML file for releases that read one, the same as arguments for 0.3 and newer.

TOML: sections of torchtitan/config/job_config.py (JobConfig, before 0.3). Arguments: those of
torchtitan/config/configs.py, trainer.py and components/optimizer of 0.3, which has no TOML any more.
"""

from __future__ import annotations

import shlex
from typing import Any

from planner.export.launch import nodes_of
from planner.export.target import (
    Draft,
    ExportFile,
    Target,
    gpus_of,
    model_name,
    refuse,
    training,
)
from planner.export.text import toml_text
from planner.plan import Plan
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    Optimizer,
    Precision,
    TrainingWorkload,
)

TOML_FILE, ARGUMENTS_FILE = "torchtitan.toml", "torchtitan.sh"
HEAD = (
    "Exported by Peakmark for torchtitan before 0.3: --job.config_file torchtitan.toml\n"
    "torchtitan 0.3 reads arguments instead: torchtitan.sh"
)
# Hub id -> model and flavour of the TOML, configuration function of 0.3.
MODELS = {
    "meta-llama/Llama-3.1-8B": ("llama3", "8B", "llama3_8b"),
    "meta-llama/Llama-3.1-70B": ("llama3", "70B", "llama3_70b"),
    "meta-llama/Llama-3.1-405B": ("llama3", "405B", "llama3_405b"),
    "Qwen/Qwen3-0.6B": ("qwen3", "0.6B", "qwen3_0_6b"),
    "Qwen/Qwen3-1.7B": ("qwen3", "1.7B", "qwen3_1_7b"),
    "Qwen/Qwen3-14B": ("qwen3", "14B", "qwen3_14b"),
    "Qwen/Qwen3-32B": ("qwen3", "32B", "qwen3_32b"),
    "Qwen/Qwen3-30B-A3B": ("qwen3", "30B-A3B", "qwen3_30b_a3b"),
}
_IMPLEMENTATIONS = {
    Optimizer.ADAMW_FUSED: "fused",
    Optimizer.ADAMW_FOREACH: "foreach",
    Optimizer.ADAMW_LOOP: "for-loop",
}


def torchtitan_draft(plan: Plan) -> Draft:
    """Write TOML and arguments; raises PlanError for what torchtitan cannot shard or cast so."""
    workload = training(plan, Target.TORCHTITAN)
    name = model_name(plan)
    if name not in MODELS:
        why = f"torchtitan has no configuration of it; it has {', '.join(MODELS)}"
        raise refuse(Target.TORCHTITAN, "model", name or "one of your own", why)
    _check(plan, workload)
    model, flavour, _ = MODELS[name]
    sections = {
        "job": {"description": f"{name}, exported by Peakmark"},
        "model": {"name": model, "flavor": flavour},
        **_shared(plan, workload),
        "activation_checkpoint": _checkpointing(workload),
    }
    text = toml_text(sections, HEAD)
    return Draft(
        files=(
            ExportFile(name=TOML_FILE, text=text, language="toml"),
            ExportFile(name=ARGUMENTS_FILE, text=_arguments(plan, workload, name), language="bash"),
        ),
        holds=frozenset(_holds(workload)),
        notes=_notes(plan, workload),
    )


def _check(plan: Plan, workload: TrainingWorkload) -> None:
    stage = plan.parallelism.zero_stage
    if stage == 1:
        why = "torchtitan replicates (stage 0) or shards (2, 3); take one of them, or export to deepspeed"
        raise refuse(Target.TORCHTITAN, "parallelism.zero_stage", stage, why)
    is_replicated = stage == 0
    if workload.precision is Precision.AUTOCAST and not is_replicated:
        why = "it casts parameters when it shards; take mixed, or ZeRO stage 0"
        raise refuse(Target.TORCHTITAN, "workload.precision", "autocast", why)
    if workload.precision is Precision.MIXED and is_replicated:
        why = "without sharding it autocasts fp32 weights; take autocast, or ZeRO stage 2 or 3"
        raise refuse(Target.TORCHTITAN, "workload.precision", "mixed", why)
    if workload.checkpoint_every > 1:
        why = "it checkpoints all layers since 0.3; take 1"
        raise refuse(Target.TORCHTITAN, "workload.checkpoint_every", workload.checkpoint_every, why)


def _shared(plan: Plan, workload: TrainingWorkload) -> dict[str, dict[str, Any]]:
    """Return the sections that both forms have by the same names."""
    spread, is_replicated = plan.parallelism, plan.parallelism.zero_stage == 0
    computes_in_bf16 = workload.precision is not Precision.FP32
    training_section: dict[str, Any] = {
        "local_batch_size": workload.micro_batch,
        "global_batch_size": workload.micro_batch * workload.grad_accumulation * spread.world_size,
        "seq_len": workload.sequence_length,
        # Without clipping no norm is too large; torchtitan's own default is 1.
        "max_norm": workload.max_grad_norm or float("inf"),
        "dtype": "bfloat16" if workload.precision is Precision.BF16 else "float32",
        "mixed_precision_param": "bfloat16" if computes_in_bf16 else "float32",
        "mixed_precision_reduce": "float32",
    }
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": spread.world_size if is_replicated else 1,
        "data_parallel_shard_degree": 1 if is_replicated else spread.world_size,
        "fsdp_reshard_after_forward": "always" if spread.zero_stage == 3 else "never",
        "tensor_parallel_degree": spread.tensor_parallel,
        "pipeline_parallel_degree": spread.pipeline_parallel,
        "context_parallel_degree": spread.context_parallel,
        "expert_parallel_degree": spread.expert_parallel,
    }
    optimizer = _IMPLEMENTATIONS.get(workload.optimizer)
    return {
        **({"optimizer": {"name": "AdamW", "implementation": optimizer}} if optimizer else {}),
        "training": training_section,
        "parallelism": parallelism,
    }


def _checkpointing(workload: TrainingWorkload) -> dict[str, Any]:
    mode = str(workload.checkpointing)
    is_selective = workload.checkpointing is Checkpointing.SELECTIVE
    return {"mode": mode} | ({"selective_ac_option": "op"} if is_selective else {})


def _arguments(plan: Plan, workload: TrainingWorkload, name: str) -> str:
    nodes, each = nodes_of(plan, Target.TORCHTITAN)
    module, _, function = MODELS[name]
    # 0.3 has param groups instead of an optimizer's name.
    options = {
        f"--{section}.{key}": value
        for section, values in _shared(plan, workload).items()
        for key, value in values.items()
        if (section, key) != ("optimizer", "name")
    }
    if plan.parallelism.tensor_parallel > 1 and not plan.parallelism.sequence_parallel:
        options["--parallelism.no-enable_sequence_parallel"] = None
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={each}", "-m", "torchtitan.train"]
    words += ["--module", module, "--config", function]
    for key, value in options.items():
        words += [key.replace("_", "-")] + ([] if value is None else [str(value)])
    # A subcommand, so it comes last.
    words.append(f"activation-checkpoint:{workload.checkpointing}")
    return f"#!/bin/bash\n# Exported by Peakmark for torchtitan 0.3\nexec {shlex.join(words)}\n"


def _holds(workload: TrainingWorkload) -> set[str]:
    found = {
        *("engine", "zero_stage", "world_size", "tensor_parallel", "sequence_parallel"),
        *("pipeline_parallel", "context_parallel", "expert_parallel"),
        *("sequence_length", "micro_batch", "grad_accumulation", "precision"),
        *("max_grad_norm", "checkpointing", "checkpoint_every"),
    }
    found |= {"optimizer"} if workload.optimizer in _IMPLEMENTATIONS else set()
    return found | ({"attention"} if workload.attention is Attention.SDPA else set())


def _notes(plan: Plan, workload: TrainingWorkload) -> tuple[str, ...]:
    spread = plan.parallelism
    notes = ["Give data, tokenizer, steps and learning rate as your run needs them."]
    if spread.engine is not Engine.FSDP2:
        notes.append(
            f"The plan is of engine {spread.engine}: torchtitan shards with FSDP2, whose memory and "
            "speed are others; plan with engine fsdp2 to see them."
        )
    if workload.precision is Precision.BF16:
        notes.append("torchtitan reduces gradients in fp32; the plan's bf16 reduces them in bf16.")
    if workload.checkpointing is Checkpointing.SELECTIVE:
        notes.append(
            "torchtitan's selective saves every second matrix product; the plan's saves all."
        )
    if spread.tensor_parallel > 1 and not spread.sequence_parallel:
        notes.append("Before 0.3 torchtitan always splits the sequence with tensor parallelism.")
    if nodes_of(plan, Target.TORCHTITAN)[0] > 1:
        notes.append(
            f"Start torchtitan.sh on every node, {gpus_of(plan):,} GPUs in all, with a rendezvous."
        )
    return tuple(notes)
