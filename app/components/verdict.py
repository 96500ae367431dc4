"""The answer first: does it fit, how close, when is the peak, how fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.charts.style import signed, size_text, words
from app.components.figure import metric_row
from app.plan_words import speed_detail
from planner.error_history import Interval
from planner.units import format_count, format_seconds
from planner.verdict import verdict_sentence

LOOKS: Mapping[str, tuple[str, str, str]] = {
    "fits": ("FITS", "green", ":material/check_circle:"),
    "tight": ("TIGHT", "orange", ":material/warning:"),
    "does_not_fit": ("DOES NOT FIT", "red", ":material/cancel:"),
}


def show_verdict(prediction: Mapping[str, Any], unit: str) -> None:
    """Draw the verdict with the headroom per GPU, and what explains it."""
    verdict = prediction["verdict"]
    label, colour, icon = LOOKS[verdict["state"]]
    with st.container(border=True, key="verdict"):
        st.markdown(f"## :{colour}[{icon} {label}]")
        st.markdown(sentence_in(verdict, unit))
        st.markdown(peak_sentence(prediction["memory"], unit))
        with metric_row():
            _memory_metrics(prediction, unit)


def sentence_in(verdict: Mapping[str, Any], unit: str) -> str:
    """Return a verdict's sentence with its sizes in `unit`."""
    state, needed, capacity = (
        verdict[name] for name in ("state", "needed_bytes", "capacity_bytes")
    )
    return verdict_sentence(
        state, needed, capacity, interval_of(verdict), lambda size: size_text(size, unit)
    )


def interval_of(verdict: Mapping[str, Any]) -> Interval | None:
    """Return a verdict's interval; None where nothing like the plan was measured."""
    if verdict.get("basis") is None:
        return None
    return Interval(**{name: verdict[name] for name in Interval.__dataclass_fields__})


def _memory_metrics(prediction: Mapping[str, Any], unit: str) -> None:
    verdict = prediction["verdict"]
    share = 100 * verdict["headroom_fraction"]
    st.metric(
        "Predicted per GPU",
        size_text(verdict["needed_bytes"], unit),
        help="Device bytes on the worst GPU: all that the driver would show in use.",
    )
    training = prediction["serving"] is None
    st.metric(
        "GPU memory" if training else "Usable memory", size_text(verdict["capacity_bytes"], unit)
    )
    st.metric(
        "Headroom",
        signed(size_text(verdict["headroom_bytes"], unit)),
        signed(f"{share:+z,.1f} % of the {'GPU' if training else 'usable memory'}"),
        # The sign is no hyphen, by which the colour would be told.
        delta_color="red" if share < 0 else "green",
        delta_arrow="off",
    )
    if prediction["serving"] is not None:
        st.metric("Sequences that fit", f"{prediction['serving']['max_sequences']:,}")


def peak_sentence(memory: Mapping[str, Any], unit: str) -> str:
    """Return when the peak stands and what it is mostly made of."""
    largest = max(memory["components"], key=lambda part: part["bytes"])
    size = size_text(largest["bytes"], unit)
    return f"Peak in **{peak_label(memory).lower()}**; the largest part is {words(largest['name'])}, {size}."


def peak_label(memory: Mapping[str, Any]) -> str:
    """Return the readable name of the phase in which the peak stands."""
    named = {phase["name"]: phase["label"] for phase in memory["phases"]}
    return named.get(memory["peak_phase"], words(str(memory["peak_phase"])))


def show_speed(throughput: Mapping[str, Any]) -> None:
    """Draw the predicted speed; it is labelled for what it is."""
    st.markdown(f"#### Speed · :gray[{throughput['label']}]")
    with metric_row():
        st.metric(
            "Tokens per second",
            format_count(throughput["tokens_per_s"]),
            help="All GPUs together.",
        )
        st.metric("Step time", format_seconds(throughput["step_time_s"]))
        mfu = throughput["mfu"]
        st.metric(
            "MFU",
            "unknown" if mfu is None else f"{100 * mfu:.1f} %",
            help="Model FLOPs of the step over the peak FLOPs of the GPUs in its time.",
        )
        st.metric("Bound by", words(throughput["bound"]))
    if throughput["phases_s"]:
        st.caption(speed_detail(throughput))
