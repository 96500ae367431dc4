"""The timeline of one step: predicted, and measured over it where a run recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app import plan_curves
from app.charts.style import size_text
from app.charts.timeline import timeline_figure
from app.components.figure import show_figure, show_table
from app.timeline_rows import difference_rows, largest_difference, timeline_rows

CAPTION = (
    "Predicted allocated bytes (stacked) at the high point and at the end of every section: the "
    "embedding, every layer, the loss, their backwards and the optimizer, replayed through the "
    "allocator's rules. Hover for the parts; layers count from 0."
)


def show_timeline(plan: Mapping[str, Any], unit: str) -> None:
    """Draw the predicted timeline of a plan's step, or say why there is none."""
    found = plan_curves.timeline_of(plan)
    if found["reason"]:
        st.caption(f":material/info: No timeline: {found['reason']}")
        return
    sections = found["sections"]
    show_figure(
        timeline_figure(sections, unit),
        key="timeline",
        title="One step, moment by moment",
        caption=CAPTION,
        rows=timeline_rows(sections),
    )


def show_measured_timeline(
    plan: Mapping[str, Any], measured: Sequence[Sequence[Any]], unit: str
) -> None:
    """Draw a run's timeline over the predicted one, with their differences; or what there is."""
    found = plan_curves.timeline_of(plan)
    if found["reason"]:
        if measured:
            st.caption(f":material/info: Measured sections only: {found['reason']}")
            show_table(_measured_rows(measured), key="measured_timeline")
        return
    sections = found["sections"]
    rows = difference_rows(sections, measured)
    note = _difference_words(rows, unit) if rows else "This run recorded no timeline."
    show_figure(
        timeline_figure(sections, unit, measured),
        key="run_timeline",
        title="One step, moment by moment",
        caption=f"{note} {CAPTION}",
        rows=rows or timeline_rows(sections),
    )


def _measured_rows(measured: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        {"section": label, "end_bytes": end, "high_bytes": high} for label, end, high in measured
    ]


def _difference_words(rows: Sequence[Mapping[str, Any]], unit: str) -> str:
    worst = largest_difference(rows)
    assert worst is not None
    size = size_text(abs(worst["high_difference_bytes"]), unit)
    side = "above" if worst["high_difference_bytes"] >= 0 else "below"
    return (
        "The line was measured in one step after the timed ones. High points are furthest apart "
        f"in {worst['section']}: predicted {size} {side} measured."
    )
