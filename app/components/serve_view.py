"""What a serving run measured: latencies of its requests, speed, and every request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.components.figure import metric_row
from planner.serve_run import SERVE_COLUMNS, serve_cells, serve_headline
from planner.units import format_count, format_seconds


def show_serving(run: Mapping[str, Any]) -> None:
    """Draw the percentiles of the requests' times, and the requests themselves."""
    measured = run["measured"]
    if "latency" not in measured:
        return
    with metric_row():
        st.metric("Tokens per second", format_count(measured["tokens_per_s"]))
        for name, label in (("ttft_s", "First token, p50"), ("tpot_s", "Per token, p50")):
            if measured["latency"].get(name):
                st.metric(label, format_seconds(measured["latency"][name]["p50"]))
        st.metric("Device busy", f"{100 * measured['device_share']:.0f} %")
    st.markdown(serve_headline(measured))
    st.dataframe(
        [dict(zip(SERVE_COLUMNS, cells, strict=True)) for cells in serve_cells(measured)],
        hide_index=True,
        alt="Percentiles of the requests' times",
    )
    st.caption(
        "Times count from the arrival that the trace asked for, over requests that ended in full. The "
        "device is busy while it runs forwards; the rest is the host's scheduling and waiting for arrivals."
    )
    with st.expander("All requests", icon=":material/table_rows:"):
        columns = measured["request_columns"]
        rows = [dict(zip(columns, row, strict=True)) for row in measured["requests"]]
        st.dataframe(rows, hide_index=True, alt="Every request: arrival, lengths, times, end")
