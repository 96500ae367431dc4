"""The Ledger page: every tensor at the peak, why the peak is there, and when in the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import services
from app.charts.ledger import treemap_figure
from app.charts.memory import phases_figure
from app.charts.style import size_text, words
from app.components.current_plan import current_document, keep_plan_in_url
from app.components.figure import drawable, metric_row, show_figure
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from app.components.timeline_view import show_timeline
from app.ledger_rows import ledger_rows, matching
from app.peak_reason import (
    LEVERS,
    SERVING_LEVERS,
    contributors,
    phase_rows,
    reason_sentences,
)

TABLE_HEIGHT_PX = 460


def show_ledger_page() -> None:
    """Draw the ledger of the plan that the form describes."""
    with told_in_one_sentence():
        document = current_document()
        if document is None:
            st.info("Give a model on the Plan page to see its ledger.", icon=":material/info:")
            st.page_link("app_pages/plan.py", label="To the plan", icon=":material/straighten:")
            return
        plan = services.check_plan(document)
        keep_plan_in_url()
        prediction = services.prediction_of(plan)
        _totals(prediction, unit())
        _reason(prediction, unit())
        if plan.job == "train":
            show_timeline(document, unit())
        _tensors(prediction, unit())


def _totals(prediction: Mapping[str, Any], chosen: str) -> None:
    memory = prediction["memory"]
    with metric_row():
        st.metric(
            "Allocated at the peak",
            size_text(memory["allocated_bytes"], chosen),
            help="What tensors hold, in the allocator's blocks. The ledger sums to it.",
        )
        st.metric("Kinds of tensors", f"{len(ledger_rows(prediction)):,}")
        st.metric("Reserved", size_text(memory["reserved_bytes"], chosen))
        st.metric("Device", size_text(memory["device_bytes"], chosen))


def _reason(prediction: Mapping[str, Any], chosen: str) -> None:
    memory = prediction["memory"]
    left, right = st.columns([2, 3])
    with left, st.container(border=True, key="reason"):
        st.markdown("**Why is this the peak?**")
        levers = SERVING_LEVERS if prediction["serving"] else LEVERS
        for sentence in reason_sentences(memory, lambda size: size_text(size, chosen), levers):
            st.markdown(sentence)
        with st.popover("Table", icon=":material/table:", type="tertiary"):
            phases, parts = pd.DataFrame(phase_rows(memory)), pd.DataFrame(contributors(memory))
            st.dataframe(drawable(phases), hide_index=True, alt="Total of every phase")
            st.dataframe(drawable(parts), hide_index=True, alt="Parts of the peak")
    with right:
        show_figure(
            phases_figure(memory, chosen),
            key="ledger_phases",
            title="The peak beside the other phases",
            caption="Predicted allocated bytes at the high point of each phase, by component.",
            rows=[
                {
                    "phase": phase["label"],
                    "allocated_bytes": phase["allocated_bytes"],
                    **phase["parts"],
                }
                for phase in memory["phases"]
            ],
        )


def _tensors(prediction: Mapping[str, Any], chosen: str) -> None:
    st.markdown("### Every tensor at the peak")
    every = ledger_rows(prediction)
    rows = matching(every, *_filters(prediction, every))
    if not rows:
        st.info("No tensor of the peak is like that: widen the filter.", icon=":material/search:")
        return
    total_bytes = sum(row["bytes"] for row in rows)
    st.caption(
        f"{len(rows):,} of {len(every):,} kinds of tensors, {size_text(total_bytes, chosen)} of "
        f"{size_text(prediction['memory']['allocated_bytes'], chosen)} allocated at the peak."
    )
    show_figure(
        treemap_figure(rows, chosen),
        key="treemap",
        title="By size",
        caption="Predicted allocated bytes at the peak: area is bytes, colour is the component. "
        "Click a component to enlarge it; hover a tensor for its shape and formula. Tensors of "
        "one kind, such as a weight of every inner layer, are one tile.",
        rows=rows,
    )
    _table(rows, chosen)


def _filters(
    prediction: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str], str]:
    """Draw the filters; return the phases, components and text to keep (empty: all)."""
    labels = {phase["name"]: phase["label"] for phase in prediction["memory"]["phases"]}
    columns = st.columns(3)
    with columns[0]:
        phases = st.multiselect(
            "Alive in phase",
            list(labels),
            format_func=lambda name: labels.get(name, words(name)),
            key="ledger_phase",
            placeholder="Any phase",
            help="Of the tensors at the peak, those that are alive in one of these phases too.",
        )
    with columns[1]:
        components = st.multiselect(
            "Component",
            list(dict.fromkeys(row["component"] for row in rows)),
            format_func=words,
            key="ledger_component",
            placeholder="Any component",
        )
    with columns[2]:
        text = st.text_input(
            "Search",
            key="ledger_search",
            placeholder="Name, owner, shape or dtype",
            live="300ms",
        )
    return phases, components, text


def _table(rows: Sequence[Mapping[str, Any]], chosen: str) -> None:
    frame = pd.DataFrame([_shown(row, chosen) for row in rows])
    st.dataframe(
        drawable(frame),
        hide_index=True,
        height=min(TABLE_HEIGHT_PX, 40 + 35 * len(rows)),
        alt="Named tensors at the peak, largest first",
        column_config={
            "share %": st.column_config.NumberColumn(format="%.2f"),
            "bytes": st.column_config.NumberColumn(format="localized"),
        },
    )
    st.download_button(
        "Ledger as CSV",
        data=pd.DataFrame(list(rows)).to_csv(index=False),
        file_name="peakmark-ledger.csv",
        mime="text/csv",
        icon=":material/download:",
        on_click="ignore",
        key="ledger_csv",
    )


def _shown(row: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    return {
        "tensor": row["name"],
        "size": size_text(row["bytes"], chosen),
        "share %": row["share_percent"],
        "component": words(row["component"]),
        "kept by": row["owner"],
        "shape": row["shape_text"],
        "in symbols": row["shape"]
        if any(map(str.isalpha, row["shape"].replace(" x ", "")))
        else "",
        "dtype": row["dtype"],
        "count": row["count"],
        "bytes": row["bytes"],
        "formula": row["formula"],
        "phases": row["phases"],
    }
