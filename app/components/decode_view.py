"""What a decode run measured, beside transformers' own generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.components.figure import metric_row
from planner.decode_run import COLUMNS, headline, result_cells
from planner.serving.runs import COMPARED_COLUMNS, decode_cells
from planner.units import format_bytes, format_count, format_seconds


def show_decode(run: Mapping[str, Any]) -> None:
    """Draw the times of prefill and decode, the bytes, and every peer beside them."""
    measured = run["measured"]
    if "decode_time_s" not in measured:
        return
    spread = measured["decode_statistics"]
    with metric_row():
        st.metric("Time per step", format_seconds(measured["decode_time_s"]))
        st.metric("Tokens per second", format_count(measured["tokens_per_s"]))
        st.metric("Prefill", format_seconds(measured["prefill_time_s"]))
        st.metric("Key-value cache", format_bytes(measured["cache_bytes"]))
    st.markdown(headline(run["spec"]["decode"], measured))
    st.dataframe(
        [dict(zip(COLUMNS, cells, strict=True)) for cells in result_cells(measured)],
        hide_index=True,
        alt="Our decoding beside transformers' generation of the same model and prompts",
    )
    _show_predicted(run)
    st.caption(
        f"A step decodes one token of every sequence: median of {spread['n']}, from "
        f"{format_seconds(spread['p10_s'])} (p10) to {format_seconds(spread['p90_s'])} (p90). "
        f"Attention: {measured['attention_backend']}; CUDA graphs: "
        f"{'yes' if measured['graphs'] else 'no'}. transformers' time is that of a whole generation "
        "less one of a single token, over the rest."
    )


def _show_predicted(run: Mapping[str, Any]) -> None:
    cells = decode_cells(run["spec"]["decode"], run["measured"], run["environment"])
    if cells:
        st.dataframe(
            [dict(zip(COMPARED_COLUMNS, line, strict=True)) for line in cells],
            hide_index=True,
            alt="Today's prediction of this run beside what it measured",
        )
