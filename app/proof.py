"""What a proof runs: the job spec of a plan, and the world that this machine can give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from planner.errors import PlanError
from planner.memory.parallel import is_split
from planner.plan import Plan
from planner.saved_training import check_saved_training
from planner.workload import TrainingWorkload

WORLDS = ("nccl", "shared", "solo", "cpu")
# Of the host's free memory, the share that a run on the CPU may take.
HOST_SHARE = 0.8
# Choices of a workload whose kernels need a GPU, and what runs on a CPU instead.
GPU_ONLY = (
    ("attention", "triton", "eager or sdpa"),
    ("loss", "fused_linear", "hf or chunked"),
    ("optimizer", "adamw_8bit", "adamw_fused"),
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


def host_memory_needed_bytes(prediction: Mapping[str, Any], ranks: int) -> int:
    """Estimate what `ranks` processes on the CPU hold together: the predicted peak of each."""
    return int(prediction["memory"]["allocated_bytes"]) * ranks


def host_memory_free_bytes() -> int:
    """Return the memory that this host can give without swapping."""
    return int(psutil.virtual_memory().available * HOST_SHARE)
