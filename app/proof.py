"""What a proof runs: the job spec of a plan, and the world that this machine can give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from planner.config_keys import modelled_keys
from planner.errors import PlanError
from planner.memory.kinds import layer_kinds
from planner.memory.parallel import is_split
from planner.plan import Plan, parse_plan
from planner.saved_training import check_saved_training
from planner.workload import TrainingWorkload

WORLDS = ("nccl", "shared", "solo", "cpu")
# Of the host's free memory, the share that a run on the CPU may take.
HOST_SHARE = 0.8
SMALL_PROOF_CONFIG: Mapping[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
# Choices of a workload whose kernels need a GPU, and what runs on a CPU instead.
GPU_ONLY = (
    ("attention", "triton", "eager or sdpa"),
    ("loss", "fused_linear", "hf or chunked"),
    ("optimizer", "adamw_8bit", "adamw_fused"),
    ("optimizer", "adamw_triton", "adamw_fused"),
)


def choose_world(plan: Plan, num_gpus: int) -> str:
    """Return the world that is honest for most: a GPU per rank, else one rank alone, else CPU."""
    if num_gpus == 0:
        return "cpu"
    return "nccl" if num_gpus >= plan.parallelism.world_size else "solo"


def unprovable(plan: Plan) -> str | None:
    """Return why no run can prove a plan, in one sentence; None where one can."""
    if not is_split(plan.parallelism):
        return None
    return (
        "This plan splits the model over GPUs (tensor, pipeline, context or expert parallel): no "
        "engine here runs that, so it is planned, not proven."
    )


def check_provable(plan: Plan) -> None:
    """Raise PlanError for a plan that no run can prove."""
    reason = unprovable(plan)
    if reason is not None:
        raise PlanError("parallelism", None, "a plan that splits no model", sentence=reason)


def gpu_only(plan: Plan) -> PlanError | None:
    """Return what in a plan cannot run in the world `cpu`; None where all of it can."""
    if not isinstance(plan.workload, TrainingWorkload):
        return None
    for name, value, others in GPU_ONLY:
        if getattr(plan.workload, name) == value:
            field = f"workload.{name}"
            sentence = (
                f"{field} is '{value}': its kernels need a GPU; in the world cpu use {others}."
            )
            return PlanError(field, value, others, sentence=sentence)
    return None


def job_spec(
    plan: Plan,
    world: str,
    *,
    deadline_s: float = 1800.0,
    save_to: str | None = None,
    load_from: str | None = None,
) -> dict[str, Any]:
    """Return the job spec that proves a training plan in `world` (schema of the runners).

    Raises PlanError for a plan that no run can prove, or whose training cannot be saved as asked.
    """
    check_provable(plan)
    check_saved_training(plan, world, save_to, load_from)
    return {
        "schema": 1,
        "kind": "train_step",
        "world": world,
        "plan": plan.to_dict(),
        "attention": None,
        "rank": 0,
        "warmup": 2,
        "steps": 5,
        "seed": 0,
        "device": None,
        "deadline_s": deadline_s,
        "save_to": save_to,
        "load_from": load_from,
    }


def small_proof(plan: Plan) -> Plan:
    """Return a plan of the same choices that any host can run: a few narrow layers, two ranks."""
    document = plan.to_dict()
    editable = modelled_keys(plan.model.family)
    overrides = {key: value for key, value in SMALL_PROOF_CONFIG.items() if key in editable}
    if isinstance(plan.workload, TrainingWorkload):
        several_kinds = len(set(layer_kinds(plan.model, plan.workload))) > 1
        # Where layers differ, first and last have one between them, as in the model.
        overrides["num_hidden_layers"] = 3 if several_kinds else 2
    if plan.model.latent is not None:
        overrides["num_key_value_heads"] = overrides["num_attention_heads"]
    if plan.model.num_experts:
        # Groups of experts need two each.
        overrides["num_local_experts"] = min(
            plan.model.num_experts, max(8, 2 * plan.model.expert_groups)
        )
    config = {key: v for key, v in plan.model.hf_config.items() if key != "layer_types"}
    model = {"config": config, "name": f"small {plan.model.family}", "overrides": overrides}
    workload = {**document["workload"], "sequence_length": 64, "micro_batch": 1}
    ranks = min(2, plan.parallelism.world_size)
    parallelism = {**document["parallelism"], "world_size": ranks}
    changed = {"model": model, "workload": workload, "parallelism": parallelism}
    return parse_plan({**document, **changed})


def host_memory_needed_bytes(prediction: Mapping[str, Any], ranks: int) -> int:
    """Estimate what `ranks` processes on the CPU hold together: the predicted peak of each."""
    return int(prediction["memory"]["allocated_bytes"]) * ranks


def host_memory_free_bytes() -> int:
    """Return the memory that this host can give without swapping."""
    return int(psutil.virtual_memory().available * HOST_SHARE)
