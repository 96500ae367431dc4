"""Where the time of a profiled step or request goes, and what each part's removal could bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.charts.profile import profile_figure
from app.components.figure import metric_row, show_figure, show_table
from planner.time_parts import PART_WORDS, Part
from planner.time_shares import (
    PROFILE_COLUMNS,
    ceilings,
    method_notes,
    profile_cells,
    profile_headline,
    verdict_sentence,
)
from planner.units import format_count, format_seconds


def show_profile(run: Mapping[str, Any]) -> None:
    """Draw the answer, a bar per part with the most it could bring, the table and the kernels."""
    measured = run["measured"]
    if "base_s" not in measured:
        return
    parts = ceilings(measured)
    found = {one.part: one for one in parts}
    with metric_row():
        st.metric("Time", format_seconds(measured["step_time_s"]))
        st.metric("Tokens per second", format_count(measured["tokens_per_s"]))
        attention = found.get(Part.ATTENTION)
        st.metric(
            "Attention made free", "-" if attention is None else f"{attention.speedup:.2f}x at most"
        )
        host = found.get(Part.HOST)
        st.metric("Host gaps", "-" if host is None else f"{100 * host.share:.0f} %")
    st.markdown(f"**{verdict_sentence(measured)}**")
    rows = [dict(zip(PROFILE_COLUMNS, cells, strict=True)) for cells in profile_cells(measured)]
    if parts:
        show_figure(
            profile_figure(parts),
            key="profile",
            title="Where the time goes",
            caption="Measured time of each part: filled while it runs alone, light beside other work. At "
            "the end of a bar: how much faster the whole would be at most without it.",
            rows=rows,
        )
    st.dataframe(rows, hide_index=True, alt="Time of each part and the most it could bring")
    st.caption(" ".join((profile_headline(measured) + ".", *method_notes(measured))))
    _show_kernels(measured)
    _show_phases(measured)


def _show_kernels(measured: Mapping[str, Any]) -> None:
    with st.expander("Kernels and operations", icon=":material/table_rows:"):
        columns = measured["kernel_columns"]
        rows = [dict(zip(columns, row, strict=True)) for row in measured["kernels"]]
        words = [{**row, "part": PART_WORDS[Part(row["part"])]} for row in rows]
        show_table(words, key="profile_kernels", title="Kernels of most time, with their part")


def _show_phases(measured: Mapping[str, Any]) -> None:
    with st.expander("By phase", icon=":material/table_rows:"):
        rows = [
            {"phase": phase, "part": PART_WORDS[Part(part)], "time_s": seconds}
            for phase, parts in measured["phases"].items()
            for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
        ]
        show_table(rows, key="profile_phases", title="Time of each part in each phase")
