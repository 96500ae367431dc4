"""A figure as every page shows it: chart, caption, and the table behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

METRIC_WIDTH_PX = 140
CHART_CONFIG: Mapping[str, Any] = {"displayModeBar": False, "scrollZoom": False}


def metric_row() -> DeltaGenerator:
    """Return a row of up to four figures that wraps into two columns on a phone."""
    return st.grid(4, min_column_width=METRIC_WIDTH_PX)


def show_figure(
    figure: go.Figure,
    *,
    key: str,
    title: str,
    caption: str,
    rows: Sequence[Mapping[str, Any]],
    selectable: bool = False,
) -> list[Any]:
    """Draw a figure with its title, what it shows and which counter, and its table with CSV.

    Returns the `customdata` of the points that a person clicked, where it is `selectable`.
    """
    with st.container(border=True, key=f"{key}_card"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{title}**", width="stretch")
            with st.popover("Table", icon=":material/table:", type="tertiary"):
                show_table(rows, key=key)
        drawn = st.plotly_chart(
            figure,
            key=key,
            config=dict(CHART_CONFIG),
            alt=f"{title}. {caption}",
            on_select="rerun" if selectable else "ignore",
            selection_mode="points",
        )
        st.caption(caption)
    if not selectable:
        return []
    points = cast("Mapping[str, Any]", drawn)["selection"]["points"]
    return [point["customdata"] for point in points if "customdata" in point]


def show_table(rows: Sequence[Mapping[str, Any]], *, key: str, title: str | None = None) -> None:
    """Draw rows as a table with a CSV download."""
    frame = pd.DataFrame(list(rows))
    percents = [name for name in frame if str(name).endswith("%") and frame[name].dtype == float]
    st.dataframe(
        drawable(frame),
        hide_index=True,
        placeholder="",
        alt=title or f"Data of {key}",
        # As many decimals in each row: 0.00 beside 0.04, not 0.
        column_config=dict.fromkeys(percents, st.column_config.NumberColumn(format="%.2f")),
    )
    st.download_button(
        "CSV",
        data=frame.to_csv(index=False),
        file_name=f"peakmark-{key}.csv",
        mime="text/csv",
        icon=":material/download:",
        on_click="ignore",
        key=f"{key}_csv",
    )


def drawable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with columns of integers beyond 64 bits as floats: Arrow holds no larger."""
    huge = {
        name: float
        for name in frame
        if any(isinstance(value, int) and abs(value) >= 2**63 for value in frame[name])
    }
    return frame.astype(huge)
