"""DeepSpeed's JSON: what `deepspeed.initialize(config=...)` reads.

Fields as in deepspeed/runtime/config.py and runtime/precision_config.py of 0.19. Buckets stay at their
defaults, which the planner counts with.
"""

from __future__ import annotations

from typing import Any

from planner.export.target import (
    Draft,
    ExportFile,
    Target,
    refuse,
    refuse_splits,
    training,
)
from planner.export.text import json_text
from planner.plan import Plan
from planner.workload import Engine, Precision, ReduceDtype, TrainingWorkload

FILE = "ds_config.json"
_REDUCED = {ReduceDtype.BF16: "bf16", ReduceDtype.FP32: "fp32"}


def deepspeed_draft(plan: Plan) -> Draft:
    """Write the JSON; raises PlanError for a serving plan and for splits of the model."""
    workload = training(plan, Target.DEEPSPEED)
    refuse_splits(plan, Target.DEEPSPEED)
    check_precision(plan, workload, Target.DEEPSPEED)
    config = deepspeed_config(plan, workload)
    return Draft(
        files=(ExportFile(name=FILE, text=json_text(config), language="json"),),
        holds=held(),
        notes=(*_engine_notes(plan), *_notes(workload), *_world_note(plan)),
    )


def check_precision(plan: Plan, workload: TrainingWorkload, target: Target) -> None:
    """Raise PlanError for states in bf16 that no stage shards: DeepSpeed has them from stage 1 on."""
    if workload.precision is Precision.BF16 and plan.parallelism.zero_stage == 0:
        why = "DeepSpeed keeps master weights and states in bf16 from ZeRO stage 1 on; take mixed"
        raise refuse(target, "workload.precision", "bf16", why)


def held() -> frozenset[str]:
    """Return the settings that the JSON holds."""
    return frozenset(
        (
            *("micro_batch", "grad_accumulation", "precision", "engine", "zero_stage"),
            *("offload_optimizer", "reduce_dtype", "max_grad_norm", "world_size"),
        )
    )


def deepspeed_config(plan: Plan, workload: TrainingWorkload) -> dict[str, Any]:
    """Return the configuration of a training plan, JSON-ready."""
    zero: dict[str, Any] = {"stage": plan.parallelism.zero_stage}
    if workload.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.grad_accumulation,
        "gradient_clipping": workload.max_grad_norm,
        **_precision(workload.precision),
        "zero_optimization": zero,
        # The script makes the optimizer, as torch's own: DeepSpeed wants to be told that this is meant.
        "zero_allow_untested_optimizer": True,
    }
    reduced = _REDUCED.get(workload.reduce_dtype)
    return config | ({"communication_data_type": reduced} if reduced else {})


def _precision(precision: Precision) -> dict[str, Any]:
    if precision is Precision.FP32:
        return {}
    if precision is Precision.AUTOCAST:
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    bf16: dict[str, Any] = {"enabled": True}
    if precision is Precision.BF16:
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return {"bf16": bf16}


def _engine_notes(plan: Plan) -> list[str]:
    if plan.parallelism.engine is Engine.DEEPSPEED:
        return []
    return [
        f"The plan is of engine {plan.parallelism.engine}: DeepSpeed's memory and speed are others at "
        "the same stage; plan with engine deepspeed to see them."
    ]


def _notes(workload: TrainingWorkload) -> list[str]:
    notes = []
    if workload.offload_optimizer:
        notes.append(
            "With offload_optimizer the script makes deepspeed.ops.adam.DeepSpeedCPUAdam; the plan "
            "counted torch's optimizer on the CPU."
        )
    if workload.precision is Precision.BF16:
        notes.append("Master weights and states in bf16 need DeepSpeed 0.18 or newer.")
    return notes


def _world_note(plan: Plan) -> list[str]:
    ranks = plan.parallelism.world_size
    return [f"The JSON holds no number of ranks: start {ranks:,} (torchrun or sbatch export)."]
