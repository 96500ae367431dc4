"""accelerate's YAML: what `accelerate launch --config_file` reads.

Fields as in accelerate/commands/config/config_args.py (ClusterConfig) and
utils/dataclasses.py (FullyShardedDataParallelPlugin) of 1.15.
"""

from __future__ import annotations

from typing import Any

from planner.export.deepspeed import FILE as DEEPSPEED_FILE
from planner.export.deepspeed import deepspeed_config, held
from planner.export.launch import nodes_of
from planner.export.target import (
    Draft,
    ExportFile,
    Target,
    refuse,
    refuse_splits,
    training,
)
from planner.export.text import json_text, yaml_text
from planner.plan import Plan
from planner.workload import (
    Checkpointing,
    Engine,
    Precision,
    ReduceDtype,
    TrainingWorkload,
)

FILE = "accelerate.yaml"
HEAD = "Exported by Peakmark: accelerate launch --config_file accelerate.yaml train.py"


def accelerate_draft(plan: Plan) -> Draft:
    """Write the YAML: DDP, FSDP2 or DeepSpeed by the plan's engine and stage; raises PlanError."""
    workload = training(plan, Target.ACCELERATE)
    refuse_splits(plan, Target.ACCELERATE)
    stage, engine = plan.parallelism.zero_stage, plan.parallelism.engine
    if engine is Engine.ZERO_REDUNDANCY:
        why = "accelerate has no ZeroRedundancyOptimizer; take engine deepspeed, stage 1"
        raise refuse(Target.ACCELERATE, "parallelism.engine", str(engine), why)
    if engine is Engine.DEEPSPEED or (engine is Engine.PEAKMARK and stage in (1, 2)):
        return _with_deepspeed(plan, workload)
    return _with_ddp(plan, workload) if stage == 0 else _with_fsdp(plan, workload)


def _common(plan: Plan, kind: str) -> dict[str, Any]:
    nodes, each = nodes_of(plan, Target.ACCELERATE)
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": nodes,
        "num_processes": nodes * each,
        "machine_rank": 0,
        "use_cpu": False,
        "debug": False,
    }
    return values | ({"rdzv_backend": "c10d"} if nodes > 1 else {})


def _draft(
    plan: Plan, values: dict[str, Any], holds: tuple[str, ...], notes: tuple[str, ...] = ()
) -> Draft:
    file = ExportFile(name=FILE, text=yaml_text(values, HEAD), language="yaml")
    always = ("engine", "zero_stage", "world_size")
    return Draft(
        files=(file,), holds=frozenset((*always, *holds)), notes=(*notes, *_machine_notes(values))
    )


def _machine_notes(values: dict[str, Any]) -> tuple[str, ...]:
    if values["num_machines"] == 1:
        return ()
    return (
        "On each machine give its own --machine_rank, and --main_process_ip and --main_process_port "
        "of the first.",
    )


def _peakmark_note(plan: Plan, kind: str) -> tuple[str, ...]:
    if plan.parallelism.engine is not Engine.PEAKMARK:
        return ()
    return (
        f"accelerate has no engine peakmark: {kind} runs the same stage, with other memory and speed; "
        "plan with its engine to see them.",
    )


def _with_deepspeed(plan: Plan, workload: TrainingWorkload) -> Draft:
    """Point to DeepSpeed's own JSON, which then says everything about precision and batches."""
    values = _common(plan, "DEEPSPEED") | {
        "deepspeed_config": {
            "deepspeed_config_file": DEEPSPEED_FILE,
            "zero3_init_flag": plan.parallelism.zero_stage == 3,
        }
    }
    draft = _draft(plan, values, tuple(held()), _peakmark_note(plan, "DeepSpeed"))
    config = json_text(deepspeed_config(plan, workload))
    file = ExportFile(name=DEEPSPEED_FILE, text=config, language="json")
    return Draft(files=(*draft.files, file), holds=draft.holds, notes=draft.notes)


def _with_ddp(plan: Plan, workload: TrainingWorkload) -> Draft:
    if workload.precision is Precision.MIXED:
        why = "accelerate's DDP keeps no fp32 copy of bf16 weights; take autocast, bf16 or fp32"
        raise refuse(Target.ACCELERATE, "workload.precision", "mixed", why)
    is_autocast = workload.precision is Precision.AUTOCAST
    kind = "MULTI_GPU" if plan.parallelism.world_size > 1 else "NO"
    values = _common(plan, kind) | {"mixed_precision": "bf16" if is_autocast else "no"}
    holds = ("precision",) if is_autocast else ()
    return _draft(plan, values, holds, _peakmark_note(plan, "DDP"))


def _with_fsdp(plan: Plan, workload: TrainingWorkload) -> Draft:
    if workload.precision is Precision.AUTOCAST:
        why = "under FSDP2 accelerate casts the parameters; take mixed"
        raise refuse(Target.ACCELERATE, "workload.precision", "autocast", why)
    is_mixed = workload.precision is Precision.MIXED
    is_full = workload.checkpointing is Checkpointing.FULL and workload.checkpoint_every == 1
    values = _common(plan, "FSDP") | {
        "mixed_precision": "bf16" if is_mixed else "no",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan.parallelism.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": is_full,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        },
    }
    holds = [*(["precision"] if is_mixed else []), *(["checkpointing"] if is_full else [])]
    notes = _peakmark_note(plan, "FSDP2")
    if is_mixed and workload.reduce_dtype is ReduceDtype.BF16:
        holds.append("reduce_dtype")
    elif is_mixed:
        notes = (
            *notes,
            "accelerate's FSDP2 reduces gradients in bf16 here; the plan's fsdp2 in fp32.",
        )
    return _draft(plan, values, tuple(holds), notes)
