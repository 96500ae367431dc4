"""The Runs page: a live table, and what can be done with the chosen run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from app import services
from app.charts.proof import error_percent
from app.charts.style import size_text
from app.components.header import unit
from app.components.problems import told_in_one_sentence

REFRESH = "2s"
RERUN_KEY = "rerun_key"
STATE_NAMES = (
    "queued",
    "running",
    "done",
    "oom_device",
    "oom_host",
    "failed",
    "crashed",
    "timed_out",
    "cancelled",
    "lost",
)
STATE_COLOURS: Mapping[str, str] = {
    "queued": "gray",
    "running": "blue",
    "cancelling": "orange",
    "done": "green",
    "oom_device": "orange",
    "oom_host": "orange",
    "cancelled": "gray",
}


def state_badge(run: Mapping[str, Any]) -> str:
    """Return a run's state as coloured text; a run being stopped says so."""
    name = "cancelling" if run["cancelling"] else str(run["state"])
    return f":{STATE_COLOURS.get(name, 'red')}-badge[{name.replace('_', ' ')}]"


@st.fragment(run_every=REFRESH, key="runs")
def show_runs() -> None:
    """Draw the table of runs; it reads the database again every two seconds."""
    with told_in_one_sentence():
        states = st.multiselect(
            "States",
            STATE_NAMES,
            key="run_states",
            bind="query-params",
            placeholder="All states",
            label_visibility="collapsed",
        )
        runs = services.run_lines(states)
        if not runs:
            _say_that_there_are_none(bool(states))
            return
        chosen = st.dataframe(
            [run_row(run, unit()) for run in runs],
            key="run_table",
            hide_index=True,
            on_select="rerun",
            selection_mode="single-row",
            placeholder="",
            height=min(620, 38 + 35 * len(runs)),
            alt="Runs, newest first",
        )
        _actions(runs, list(chosen["selection"]["rows"]))


def _say_that_there_are_none(filtered: bool) -> None:
    if filtered:
        st.info("No run is in these states.", icon=":material/filter_alt:")
        return
    st.info(
        "Nothing has run yet. Press **Prove it** on the Plan page: what it predicts is then "
        "measured and kept here.",
        icon=":material/science:",
    )
    st.page_link("app_pages/plan.py", label="To the Plan page", icon=":material/straighten:")


def run_row(run: Mapping[str, Any], chosen_unit: str) -> dict[str, Any]:
    """Return a run as a line of the table."""
    words = services.run_words(run)
    predicted, measured = words["predicted_bytes"], words["measured_bytes"]
    both = predicted and measured
    return {
        "state": ("cancelling" if run["cancelling"] else str(run["state"])).replace("_", " "),
        "kind": str(run["kind"]).replace("_", " "),
        "model": str(words["model"] or "").rsplit("/", 1)[-1],
        "predicted": None if predicted is None else size_text(predicted, chosen_unit),
        "measured": size_text(measured, chosen_unit) if measured else None,
        "error %": round(error_percent(predicted, measured), 2) + 0.0 if both else None,
        "counter": words["counter"],
        "world": str(run["world"]),
        "plan": words["plan"],
        "started": clock(run["started_at_ms"] or run["created_at_ms"]),
        "duration": duration(run),
        "run": run["id"],
    }


def clock(at_ms: int | None) -> str:
    """Return a time as a person reads it, in UTC."""
    if at_ms is None:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(run: Mapping[str, Any]) -> str:
    """Return how long a run took, or has taken; empty before it starts."""
    if run["started_at_ms"] is None:
        return ""
    end_ms = run["finished_at_ms"] or int(datetime.now(UTC).timestamp() * 1000)
    return f"{(end_ms - run['started_at_ms']) / 1000:.1f} s"


def _actions(runs: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> None:
    if not rows or rows[0] >= len(runs):
        st.caption(
            "Bytes of one rank by the counter named: the allocator's peak on a GPU, the training "
            "state on the CPU. Select a row to open, cancel or repeat it."
        )
        return
    show_actions(runs[rows[0]])


def show_actions(run: Mapping[str, Any], *, with_link: bool = True) -> None:
    """Draw what can be done with one run: open, cancel while it goes, run again."""
    with st.container(horizontal=True, vertical_alignment="center", width="content"):
        if with_link:
            st.page_link(
                "app_pages/run.py",
                label=f"Open run {run['id']}",
                icon=":material/timeline:",
                query_params={"run": run["id"]},
            )
        over = str(run["state"]) in services.FINAL_STATE_NAMES
        st.button(
            "Cancel",
            icon=":material/stop_circle:",
            key=f"cancel_{run['id']}",
            disabled=over or run["cancelling"],
            on_click=_cancel,
            args=(run["id"],),
        )
        st.button(
            "Run again",
            icon=":material/replay:",
            key=f"again_{run['id']}",
            on_click=_run_again,
            args=(run["id"],),
        )


def _cancel(run_id: str) -> None:
    try:
        stopped = services.cancel_run(run_id)
    except services.PROBLEMS as problem:
        st.toast(str(problem), icon=":material/error:")
        return
    st.toast("Asked the run to stop." if stopped else "The run has ended already.")


def _run_again(run_id: str) -> None:
    key = st.session_state.setdefault(RERUN_KEY, uuid.uuid4().hex)
    try:
        new_id = services.rerun(run_id, key)
    except (*services.PROBLEMS, KeyError) as problem:
        st.toast(str(problem), icon=":material/error:")
        return
    st.session_state[RERUN_KEY] = uuid.uuid4().hex
    st.toast(f"Run {new_id} is queued.", icon=":material/check:")
