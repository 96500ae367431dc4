"""What a serving run measured: latencies of its requests, speed, and every request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.components.figure import metric_row, show_table
from planner.serve_run import (
    PEER_COLUMNS,
    SERVE_COLUMNS,
    host_sentence,
    peer_cells,
    serve_cells,
    serve_headline,
)
from planner.simulation.runs import (
    COMPARED_COLUMNS,
    SimulatedRun,
    compare_latency,
    compared_cells,
    simulated_row,
)
from planner.simulation.words import simulated_headline, simulated_rest
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
    if spent := host_sentence(measured):
        st.markdown(spent)
    st.dataframe(
        [dict(zip(SERVE_COLUMNS, cells, strict=True)) for cells in serve_cells(measured)],
        hide_index=True,
        alt="Percentiles of the requests' times",
    )
    st.caption(
        "Times count from the arrival that the trace asked for, over requests that ended in full. The "
        "device is busy while it runs forwards; the rest is the host's scheduling and waiting for arrivals."
    )
    _show_peers(measured)
    _show_simulated(run)
    with st.expander("All requests", icon=":material/table_rows:"):
        columns = measured["request_columns"]
        rows = [dict(zip(columns, row, strict=True)) for row in measured["requests"]]
        st.dataframe(rows, hide_index=True, alt="Every request: arrival, lengths, times, end")


def _show_peers(measured: Mapping[str, Any]) -> None:
    """Draw who else served the trace in the same run, where anybody did."""
    cells = peer_cells(measured)
    if not cells:
        return
    st.markdown("**The same trace, served by others in the same run**")
    st.dataframe(
        [dict(zip(PEER_COLUMNS, row, strict=True)) for row in cells],
        hide_index=True,
        alt="Other servers over the same trace",
    )
    for name, peer in measured["peers"].items():
        if reason := peer.get("message") or peer.get("first_error"):
            st.caption(f"{name}: {reason}")
    st.caption(
        "Each gets as many pages, requests at once and tokens a step. Equal tokens: with the same weights; in "
        "16-bit types rounding parts them."
    )


def _show_simulated(run: Mapping[str, Any]) -> None:
    """Draw today's simulation of the run's own trace beside what it measured."""
    found = simulated_row(run["spec"], run["environment"], run["measured"])
    if found is None:
        return
    st.markdown("**Simulated beside measured**")
    cells = compared_cells(compare_latency(found, run["measured"]))
    show_table(
        [dict(zip(COMPARED_COLUMNS, row, strict=True)) for row in cells],
        key="serve_simulated",
        title="Percentiles simulated beside measured",
    )
    st.caption(_simulated_words(found))


def _simulated_words(found: SimulatedRun) -> str:
    counted, static = found.continuous.to_dict(), found.static.to_dict()
    return (
        f"Today's simulation of this trace, cache and chunks on {found.gpu.name}, told nothing of the run: "
        f"{simulated_headline(counted)}. {simulated_rest(counted)} Static batching: "
        f"{simulated_headline(static)}. Step times: {found.source}."
    )
