"""The Accuracy page: what `peakmark accuracy` prints, as figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import measured
from app.charts.proof import residual_strip_figure
from app.charts.style import words
from app.components.figure import show_figure, show_table
from app.components.problems import told_in_one_sentence

GROUP_LABELS = (
    "architecture",
    "engine",
    "stage",
    "world size",
    "attention",
    "checkpointing",
    "precision",
    "optimizer",
    "loss",
    "accumulation",
    "LoRA",
    "variant",
    "world",
    "gpu",
    "GPU filled",
)
# What is there within this time is drawn at once; after it the page says how far it is.
WAIT_S = 2.0
REDRAW_S = 1.0
STATISTICS: Mapping[str, str] = {
    "mean_percent": "signed mean %",
    "mean_absolute_percent": "mean absolute %",
    "p90_percent": "p90 %",
    "worst_percent": "worst %",
}


def show_accuracy_page() -> None:
    """Draw the errors of today's predictions over every stored measurement."""
    with told_in_one_sentence():
        report = measured.accuracy(WAIT_S)
        if "done" in report:
            _progress()
            return
        _false_verdicts(report)
        if not report["residuals"]:
            _say_that_there_is_nothing(report["rows"])
            return
        _quantities(report)
        _verdicts(report["verdicts"])
        _ranking(report["ranking"])
        _strips(report)


@st.fragment(run_every=REDRAW_S)
def _progress() -> None:
    """Say how far the predictions are; draw the page anew when they are all there."""
    with told_in_one_sentence():
        report = measured.accuracy(0.0)
        if "done" not in report:
            st.rerun()
        done, total = report["done"], report["total"]
        st.progress(done / total, f"Predicted for {done} of {total} stored measurements.")
        st.caption(
            "Today's planner predicts for every stored measurement, to show how far off it is. Once "
            "per start of this server; other pages can be used meanwhile."
        )


def _false_verdicts(report: Mapping[str, Any]) -> None:
    wrong = report["false_fits"]
    if wrong:
        st.error(
            f"False “fits”: {len(wrong)} stored runs went out of memory although the planner "
            f"says they fit: {', '.join(wrong)}.",
            icon=":material/dangerous:",
        )
    pessimistic = report["false_does_not_fit"]
    if pessimistic:
        st.warning(
            f"False “does not fit”: {len(pessimistic)} stored runs ran although the planner says "
            f"they do not fit: {', '.join(pessimistic)}.",
            icon=":material/warning:",
        )
    for row_id, reason in report["rows"]["not_predicted"].items():
        st.warning(f"Row {row_id} is not predicted: {reason}")


def _say_that_there_is_nothing(rows: Mapping[str, Any]) -> None:
    st.info(
        f"No stored measurement can be compared yet ({rows['other']} rows of other kinds). Prove "
        "a plan, or import recorded rows with `peakmark import`.",
        icon=":material/target:",
    )


def _quantities(report: Mapping[str, Any]) -> None:
    rows = report["rows"]
    st.markdown("### How far predictions are from measurements")
    st.caption(
        f"{rows['evidence']} measurements as evidence, {rows['holdout']} of them held out: chosen "
        f"before the formulas were tuned; {rows['calibration']} used to fit a "
        "constant are shown grey and never counted. Error is 100 × (predicted − measured) / "
        "measured."
    )
    lines = [
        {"quantity": words(quantity), **_statistics(found)}
        for quantity, found in report["quantities"].items()
    ]
    show_table(lines, key="quantities")
    if report["holdout_quantities"]:
        st.markdown("**Held-out rows only**")
        held = [
            {"quantity": words(quantity), **_statistics(found)}
            for quantity, found in report["holdout_quantities"].items()
        ]
        show_table(held, key="holdout_quantities")


def _statistics(found: Mapping[str, Any]) -> dict[str, Any]:
    # Zero is added so that none of them is minus zero.
    named = {label: round(found[key], 2) + 0.0 for key, label in STATISTICS.items()}
    return {"n": found["n"], **named}


def _verdicts(confusion: Mapping[str, Mapping[str, int]]) -> None:
    """Draw today's verdicts beside how the runs ended."""
    st.markdown("**Verdicts**")
    st.caption("Tight says that the GPU's memory lies inside the interval: either may happen.")
    rows = [
        {"verdict": words(state), "ran": ends["done"], "ran out of memory": ends["oom_device"]}
        for state, ends in confusion.items()
    ]
    show_table(rows, key="verdicts")


def _ranking(ranking: Mapping[str, Any]) -> None:
    """Draw how much slower the alternative predicted to be fastest is than the fastest measured."""
    if not ranking["groups"]:
        return
    st.markdown("**Is the predicted best the best?**")
    for sentence in ranking["sentences"]:
        st.caption(sentence)
    with st.expander("Every group of alternatives", icon=":material/sort:"):
        show_table(ranking["lines"], key="ranking", title="Groups of alternatives")


def _strips(report: Mapping[str, Any]) -> None:
    residuals = report["residuals"]
    quantities = list(dict.fromkeys(residual["quantity"] for residual in residuals))
    known = {name for residual in residuals for name in residual["groups"]}
    names = report["names"]
    with st.container(horizontal=True):
        quantity = st.segmented_control(
            "Quantity",
            quantities,
            default=quantities[0],
            required=True,
            format_func=words,
            key="accuracy_quantity",
        )
        group = st.selectbox(
            "Grouped by", [name for name in GROUP_LABELS if name in known], key="accuracy_group"
        )
    points = [
        {
            "group": f"{group} {residual['groups'][group]}",
            "error_percent": residual["error_percent"],
            "label": names.get(residual["row_id"], ""),
            "row_id": residual["row_id"],
            "role": residual["role"],
        }
        for residual in residuals
        if residual["quantity"] == quantity
    ]
    points.sort(key=lambda point: point["group"])
    clicked = show_figure(
        residual_strip_figure(points),
        key="residual_strips",
        title=f"Error of {words(quantity)} by {group}",
        caption="One dot per stored measurement; to the right, the prediction was too high. Click "
        "a dot to open its run.",
        rows=points,
        selectable=True,
    )
    if clicked:
        st.switch_page("app_pages/run.py", query_params={"row": str(clicked[0])})
    st.markdown(f"**By {group}**")
    show_table(_group_lines(report["groups"][group], quantity), key="groups")


def _group_lines(values: Mapping[str, Any], quantity: str) -> list[dict[str, Any]]:
    return [
        {"value": value, **_statistics(found[quantity])}
        for value, found in values.items()
        if quantity in found
    ]
