"""What a page draws around a plan's prediction: its step in time, other stages, lengths and kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services
from app.engine_stages import possible_stages
from planner.errors import PlanError
from planner.memory.timeline_series import step_timeline, why_no_timeline
from planner.plan import Plan, parse_plan, plan_hash
from planner.predict import predict
from planner.search import grid

CURVE_LENGTHS = tuple(2**power for power in range(9, 18))
KERNELS = ("eager", "sdpa", "triton")
GRID_WORLDS = tuple(2**power for power in range(11))


def timeline_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a plan's replayed step, or the reason why there is none.

    `sections` are dictionaries of label, words and bytes (high point, end, parts, reserved).
    """
    checked = parse_plan(plan)
    return _timeline(plan_hash(checked), _canonical(checked))


@st.cache_data(max_entries=100, show_spinner=False)
def _timeline(digest: str, _plan_text: str) -> dict[str, Any]:
    plan = parse_plan(json.loads(_plan_text))
    reason = why_no_timeline(plan)
    sections = [] if reason else [section.to_dict() for section in step_timeline(plan)]
    return {"reason": reason, "sections": sections}


def stage_grid(plan: Plan) -> list[dict[str, Any]]:
    """Return device memory and verdict for every ZeRO stage and world size of this plan."""
    return _stage_grid(plan_hash(plan), _canonical(plan))


@st.cache_data(max_entries=100, show_spinner=False)
def _stage_grid(digest: str, _plan_text: str) -> list[dict[str, Any]]:
    plan = parse_plan(json.loads(_plan_text))
    stages = possible_stages(plan.parallelism.engine)
    # Ranks that split experts are a divisor of all.
    worlds = sorted(
        {world for world in GRID_WORLDS if world % plan.parallelism.expert_parallel == 0}
        | {plan.parallelism.world_size}
    )
    return list(grid(plan, zero_stages=stages, world_sizes=worlds).records())


def attention_curves(plan: Plan) -> dict[str, list[dict[str, int]]]:
    """Return device memory by sequence length for each attention kernel that can run this model."""
    return _attention_curves(plan_hash(plan), _canonical(plan))


@st.cache_data(max_entries=100, show_spinner=False)
def _attention_curves(digest: str, _plan_text: str) -> dict[str, list[dict[str, int]]]:
    document = json.loads(_plan_text)
    lengths = sorted({*CURVE_LENGTHS, document["workload"]["sequence_length"]})
    share = _segment_share(services.prediction_of(parse_plan(document))["memory"])
    curves = {
        kernel: [
            point for length in lengths if (point := _curve_point(document, kernel, length, share))
        ]
        for kernel in KERNELS
    }
    return {kernel: points for kernel, points in curves.items() if points}


def refused_kernels(plan: Plan) -> dict[str, str]:
    """Return why each attention kernel without a curve cannot run this plan, by kernel."""
    document = json.loads(_canonical(plan))
    reasons = {}
    for kernel in sorted({*KERNELS} - {*attention_curves(plan)}):
        workload = {**document["workload"], "attention": kernel}
        try:
            predict(parse_plan({**document, "workload": workload}), segment_share=0.0)
        except PlanError as refusal:
            reasons[kernel] = str(refusal)
    return reasons


def _segment_share(memory: Mapping[str, Any]) -> float:
    """What the allocator's segments of a replayed plan hold beside tensors, of its peak."""
    return float((memory["reserved_bytes"] - memory["allocated_bytes"]) / memory["allocated_bytes"])


def _curve_point(
    document: Mapping[str, Any], kernel: str, length: int, segment_share: float
) -> dict[str, int] | None:
    """One point of a curve; None where the kernel or the model cannot run that length."""
    workload = {**document["workload"], "attention": kernel, "sequence_length": length}
    try:
        plan = parse_plan({**document, "workload": workload})
        memory = predict(plan, segment_share=segment_share).to_dict()["memory"]
    except PlanError:
        return None
    scores = max(phase["parts"].get("attention", 0) for phase in memory["phases"])
    return {
        "sequence_length": length,
        "device_bytes": memory["device_bytes"],
        "scores_bytes": scores,
    }


def _canonical(plan: Plan) -> str:
    return json.dumps(plan.to_dict(), sort_keys=True, separators=(",", ":"))
