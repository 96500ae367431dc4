"""What a calibration run measured, beside the vendor's sheet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.components.figure import metric_row
from planner.calibration import finding_cells, stored_findings

COLUMNS = (
    *("operation", "type", "at shape"),
    *("best measured", "vendor sheet", "of it", "points"),
)


def show_calibration(run: Mapping[str, Any]) -> None:
    """Draw the best of each operation, and all points to search and download."""
    measured = run["measured"]
    found = stored_findings(measured, run["environment"])
    with metric_row():
        st.metric("Points measured", len(measured["curves"]))
        st.metric("Time", f"{measured.get('duration_s') or 0.0:.0f} s")
        if measured.get("left_out"):
            st.metric("Left out", len(measured["left_out"]), help="The budget was over.")
    st.dataframe(
        [dict(zip(COLUMNS, finding_cells(one), strict=True)) for one in found],
        hide_index=True,
        alt="The best of each operation beside the vendor's sheet",
    )
    st.caption(
        "GB/s of memory count what an operation must read and write; of collectives they are the bus "
        "bandwidth, what a rank's link carries. Launches and synchronize are the host's time."
    )
    with st.expander("All points", icon=":material/table_rows:"):
        rows = [{**curve, "shape": str(curve["shape"])} for curve in measured["curves"]]
        st.dataframe(rows, hide_index=True, alt="Every point: shape, bytes, FLOPs and time")
