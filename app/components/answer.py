"""The right side of the Plan page: figures, tables and downloads of one prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import plan_curves
from app.charts.choice import attention_figure, heat_map_figure
from app.charts.memory import breakdown_figure, phases_figure
from app.charts.proof import timing_figure
from app.charts.style import size_text
from app.components.figure import metric_row, show_figure
from app.components.verdict import show_speed
from app.ledger_rows import ledger_rows
from planner.plan import Plan
from planner.units import format_bytes, format_count

LEDGER_SHOWN = 8


def show_training_answer(plan: Plan, prediction: Mapping[str, Any], unit: str) -> None:
    """Draw everything that explains a training prediction beside its parts, most wanted first."""
    left, right = st.columns(2)
    with left:
        _heat_map(plan, unit)
    with right:
        _attention(plan, prediction, unit)
    _phases(prediction, unit)
    show_speed(prediction["throughput"])
    _timing(prediction["throughput"])


def show_serving_answer(prediction: Mapping[str, Any], unit: str) -> None:
    """Draw everything that explains a serving prediction beside its parts."""
    serving = prediction["serving"]
    st.markdown("#### Key-value cache")
    with metric_row():
        st.metric("Per token", format_bytes(serving["kv_bytes_per_token"]))
        st.metric("Weights", size_text(serving["weights_bytes"], unit))
        st.metric("Room for the cache", size_text(serving["kv_pool_bytes"], unit))
        st.metric("Tokens that fit", format_count(serving["max_tokens"]))
    if prediction["throughput"]:
        show_speed(prediction["throughput"])


def show_breakdown(prediction: Mapping[str, Any], unit: str) -> None:
    """Draw what fills the GPU at the peak."""
    memory = prediction["memory"]
    parts = [*memory["components"], *memory["overheads"]]
    show_figure(
        breakdown_figure(parts, prediction["verdict"]["capacity_bytes"], unit),
        key="breakdown",
        title="What fills the GPU at the peak",
        caption="Predicted (hatched). Components are allocated bytes; segments lead to reserved, "
        "context and NCCL to device bytes. Hover a part for its formula.",
        rows=[{"part": p["name"], "bytes": p["bytes"], "formula": p["formula"]} for p in parts],
    )
    st.page_link(
        "app_pages/ledger.py",
        label="Every tensor, and why this is the peak",
        icon=":material/view_quilt:",
    )


def _phases(prediction: Mapping[str, Any], unit: str) -> None:
    memory = prediction["memory"]
    rows = [
        {"phase": phase["label"], "allocated_bytes": phase["allocated_bytes"], **phase["parts"]}
        for phase in memory["phases"]
    ]
    show_figure(
        phases_figure(memory, unit),
        key="phases",
        title="Memory over the phases of a step",
        caption="Predicted allocated bytes at the high point of each phase, by component.",
        rows=rows,
    )


def _heat_map(plan: Plan, unit: str) -> None:
    cells = plan_curves.stage_grid(plan)
    current = (plan.parallelism.zero_stage, plan.parallelism.world_size)
    show_figure(
        heat_map_figure(cells, current, unit),
        key="stage_grid",
        title="ZeRO stage × GPUs",
        caption="Predicted device bytes per GPU, all else as planned. Green fits, amber (~) is "
        "tight, red (✗) does not fit; the frame is this plan, whose share of segments is taken "
        "for all.",
        rows=cells,
    )


def _attention(plan: Plan, prediction: Mapping[str, Any], unit: str) -> None:
    curves = plan_curves.attention_curves(plan)
    capacity_bytes = prediction["verdict"]["capacity_bytes"]
    sequence_length = prediction["plan"]["workload"]["sequence_length"]
    show_figure(
        attention_figure(curves, capacity_bytes, sequence_length, unit),
        key="attention_curves",
        title="Attention kernel × sequence length",
        caption="Predicted device bytes per GPU at the peak, all else as planned. Eager stores the "
        "score matrices, which grow with the square of the length; sdpa and triton store none.",
        rows=[{"kernel": kernel, **point} for kernel in curves for point in curves[kernel]],
    )
    for kernel, reason in plan_curves.refused_kernels(plan).items():
        st.caption(f"No curve for {kernel}: {reason}")


def _timing(throughput: Mapping[str, Any]) -> None:
    operations = sorted(throughput["operations"], key=lambda operation: -operation["time_s"])
    show_figure(
        timing_figure(operations),
        key="timing",
        title="Where the time of a step goes",
        caption=f"Per GPU and step, from {throughput['source']}. Collectives count with what "
        "computing does not hide of them; host.waiting is the GPU waiting to be given work.",
        rows=[*throughput["operations"], *throughput["communication"]],
    )


def show_ledger(prediction: Mapping[str, Any], unit: str) -> None:
    """Draw the largest named tensors and the way to the page that has all of them."""
    rows = ledger_rows(prediction)
    shown = [_ledger_row(row, unit) for row in rows[:LEDGER_SHOWN]]
    st.markdown("#### Ledger")
    st.caption(
        f"The {len(shown)} largest of {len(rows)} kinds of tensors at the peak: bytes of all of a "
        "kind together. The Ledger page holds every one, and says why this is the peak."
    )
    st.dataframe(shown, hide_index=True, alt="Largest tensors")


def _ledger_row(row: Mapping[str, Any], unit: str) -> dict[str, Any]:
    return {
        "tensor": row["name"],
        "size": size_text(row["bytes"], unit),
        "share %": round(row["share_percent"], 2),
        "component": row["component"],
        "shape": row["shape_text"],
        "dtype": row["dtype"],
        "count": row["count"],
        "kept by": row["owner"],
    }
