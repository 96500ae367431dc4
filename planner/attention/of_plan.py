"""The attention problem that a plan's layers pose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.attention.problem import AttentionProblem, parse_problem
from planner.plan import Plan
from planner.workload import Precision, ServingWorkload, TrainingWorkload

DEFAULT_WINDOW = 4096
_SMALLEST_WINDOW = 16


def problem_of_plan(plan: Plan, changes: Mapping[str, Any] | None = None) -> AttentionProblem:
    """Return one layer's causal attention of a plan's micro-batch, or of its prompts when serving.

    `changes` are laid over it. A window that neither says is the model's, else 4,096 tokens, else a
    quarter of shorter sequences. Latent attention counts with the head size of its keys. Raises
    PlanError naming the field at fault.
    """
    spec = plan.model
    values: dict[str, Any] = {
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "causal": True,
        **_work(plan.workload),
        **(changes or {}),
    }
    if "window" not in values:
        length = values["sequence_length"]
        values["window"] = spec.sliding_window or _default_window(length)
    return parse_problem(values)


def _work(workload: TrainingWorkload | ServingWorkload) -> dict[str, Any]:
    if isinstance(workload, ServingWorkload):
        size = {"batch": workload.sequences, "sequence_length": workload.context_length}
        return {**size, "dtype": "bf16"}
    is_fp32 = workload.precision is Precision.FP32
    return {
        "batch": workload.micro_batch,
        "sequence_length": workload.sequence_length,
        "dtype": "fp32" if is_fp32 else "bf16",
    }


def _default_window(length: object) -> int:
    if not isinstance(length, int) or length > DEFAULT_WINDOW:
        return DEFAULT_WINDOW
    return max(_SMALLEST_WINDOW, length // 4)
