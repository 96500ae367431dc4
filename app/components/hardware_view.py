"""The Hardware page: what is attached, what was measured of it, and the presets with sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services
from app.calibrations import stored_calibrations
from app.charts.style import size_text
from app.components.calibration_view import show_calibration
from app.components.figure import metric_row
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from planner.units import format_rate

REFRESH = "5s"


def show_hardware_page() -> None:
    """Draw the attached GPUs, live, and the table of presets."""
    st.markdown("### Attached to this machine")
    _attached()
    with told_in_one_sentence():
        _calibrations()
    st.markdown("### Presets")
    st.caption("Memory is what CUDA shows; rates are dense peaks of the vendor's sheet.")
    st.dataframe(
        [_preset_row(row, unit()) for row in services.gpu_rows()],
        hide_index=True,
        height=560,
        column_config={
            "id": st.column_config.TextColumn(width="medium", pinned=True),
            "notes": st.column_config.TextColumn(width="large"),
            "source": st.column_config.TextColumn(width="large"),
        },
        alt="GPU presets with their sources",
    )


def _calibrations() -> None:
    """Draw what `peakmark calibrate` measured, here or elsewhere, one at a time."""
    st.markdown("### Calibrations")
    found = stored_calibrations()
    if not found:
        st.caption("Nothing is calibrated yet: `peakmark calibrate` measures this machine.")
        return
    chosen = st.selectbox(
        "What was calibrated",
        range(len(found)),
        format_func=lambda index: found[index]["name"],
        key="calibration",
    )
    calibration = found[chosen]
    where = "made here" if calibration["run"] else "recorded elsewhere"
    st.caption(f"{calibration['name']}, {where}. The best of each operation, beside the sheet.")
    show_calibration(calibration)


@st.fragment(run_every=REFRESH, key="attached")
def _attached() -> None:
    gpus = services.attached()
    if not gpus:
        st.info(
            f"No GPU is attached: {services.why_none_attached()} Plans can be made for any "
            "preset, and small runs can be proved on the CPU.",
            icon=":material/developer_board_off:",
        )
        return
    for gpu in gpus:
        _gpu_card(gpu)


def _gpu_card(gpu: Mapping[str, Any]) -> None:
    chosen = unit()
    with st.container(border=True):
        st.markdown(f"**GPU {gpu['index']} · {gpu['name']}** · driver {gpu['driver']}")
        with metric_row():
            st.metric(
                "Memory in use",
                size_text(gpu["used_bytes"], chosen),
                f"of {size_text(gpu['total_bytes'], chosen)}",
                delta_color="off",
                delta_arrow="off",
            )
            st.metric("Processes on it", _known(gpu["compute_processes"]))
            st.metric("SM clock", _known(gpu["sm_clock_mhz"], "MHz"))
            st.metric("Temperature", _known(gpu["temperature_c"], "°C"))
        if gpu["throttle_reasons"]:
            st.warning(f"Held back by: {', '.join(gpu['throttle_reasons'])}.")
        preset = gpu["preset_id"]
        st.caption(
            f"Speed figures from preset {preset} · {gpu['uuid']}"
            if preset
            else f"No preset has its speed: give the numbers as a custom GPU · {gpu['uuid']}"
        )


def _known(value: int | None, unit_name: str = "") -> str:
    return "unknown" if value is None else f"{value:,} {unit_name}".strip()


def _preset_row(row: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    flops = row["bf16_flop_s"]
    return {
        "id": row["id"],
        "name": row["name"],
        "memory": size_text(row["visible_bytes"], chosen),
        "bandwidth": format_rate(row["mem_bandwidth_bytes_s"], "B"),
        "bf16": "none" if flops is None else format_rate(flops, "FLOP"),
        "link, each way": format_rate(row["interconnect_bytes_s"], "B"),
        "notes": row["notes"],
        "source": row["source"],
    }
