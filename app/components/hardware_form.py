"""The form's hardware part: an attached GPU, a preset, or numbers entered by hand."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import services, state
from app.components.header import current_values


def hardware_form() -> dict[str, Any]:
    """Draw the choice of GPU and return the plan's "hardware" part."""
    st.markdown("**Hardware**")
    attached = {
        f"{state.ATTACHED_PREFIX}{gpu['index']}": gpu
        for gpu in services.attached()
        if gpu["hardware"]
    }
    presets = [row["id"] for row in services.gpu_rows()]
    options = [*attached, *presets, state.CUSTOM_GPU]
    chosen = st.selectbox(
        "GPU",
        options,
        index=options.index(state.DEFAULTS["gpu"]),
        key="gpu",
        bind="query-params",
        help="attached-N is GPU N of this machine; custom takes the numbers you enter.",
    )
    if chosen in attached:
        st.caption(attached[chosen]["name"])
        return dict(attached[chosen]["hardware"])
    if chosen == state.CUSTOM_GPU:
        _custom_numbers()
        return state.custom_hardware(current_values())
    return {"preset": chosen}


def _custom_numbers() -> None:
    columns = st.columns(2)
    fields = (
        ("gpu_gib", "Memory (GiB)", 0.001, 1_000_000.0),
        ("gpu_tb_s", "Bandwidth (TB/s)", 0.000001, 10_000.0),
        ("gpu_tflop_s", "bf16 (TFLOP/s)", 0.001, 10_000_000.0),
        ("gpu_link_gb_s", "Link (GB/s each way)", 0.001, 10_000_000.0),
    )
    for index, (key, label, low, high) in enumerate(fields):
        with columns[index % 2]:
            st.number_input(
                label,
                min_value=low,
                max_value=high,
                value=state.DEFAULTS[key],
                key=key,
                bind="query-params",
            )
