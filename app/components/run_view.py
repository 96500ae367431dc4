"""The Run page: one execution, from its history to prediction beside measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import measured, services, state
from app.charts.proof import comparison_figure, error_percent, residual_figure
from app.charts.style import size_text
from app.components.attention_result import show_attention_result
from app.components.calibration_view import show_calibration
from app.components.compare_tray import add_plan
from app.components.comparison import comparison_rows, phase_rows
from app.components.decode_view import show_decode
from app.components.figure import metric_row, show_figure
from app.components.header import plan_line, unit
from app.components.limit_view import show_limit, show_limit_progress
from app.components.problems import told_in_one_sentence
from app.components.profile_view import show_profile
from app.components.quality_view import show_quality
from app.components.run_table import clock, duration, show_actions, state_badge
from app.components.serve_view import show_serving
from app.components.timeline_view import show_measured_timeline
from app.components.verdict import sentence_in
from app.run_logs import log_tail
from app.saved_words import saved_lines
from planner.units import format_count, format_seconds

REFRESH = "2s"
WATCHED = "run_watched"
LOG_HEIGHT_PX = 260
WORLD_WORDS: Mapping[str, str] = {
    "nccl": "one process per GPU: honest for memory and time",
    "shared": "all ranks on one GPU: honest for each rank's memory, not for time",
    "solo": "one rank alone on one GPU: honest for that rank's memory, not for communication",
    "cpu": "all ranks on the CPU: honest for numerics and state bytes, not device memory or time",
}


def show_run_page() -> None:
    """Draw the run that the URL names."""
    run_id = st.query_params.get("run")
    row_id = st.query_params.get("row")
    if row_id and not run_id:
        with told_in_one_sentence():
            _recorded(row_id)
        return
    if not run_id:
        st.info("No run is chosen.", icon=":material/info:")
        st.page_link("app_pages/runs.py", label="To the runs", icon=":material/list_alt:")
        return
    _live(run_id)
    with told_in_one_sentence():
        run = services.run_detail(run_id)
        if run is not None:
            _result(run)


def _recorded(row_id: str) -> None:
    """Draw a stored measurement; one that a run here made has that run's page to itself."""
    seen = measured.measurement_detail(row_id)
    if seen is None:
        st.warning(f"There is no measurement {row_id} in this database.")
        return
    summary, world = seen["summary"], seen["summary"]["world"]
    st.markdown(f"### {state_badge(summary)} {summary['model_name']}")
    if seen["plan"]:
        st.markdown(plan_line(seen["plan"]))
    place = "made here" if seen["run_id"] else "recorded elsewhere"
    st.caption(
        f"Measurement {row_id} · {place} on {seen['recorded_at'][:10]} · world {world} "
        f"({WORLD_WORDS[world]}) · {seen['role']} · the prediction is today's"
    )
    if seen["run_id"]:
        st.page_link(
            "app_pages/run.py",
            label="Open its run",
            icon=":material/timeline:",
            query_params={"run": seen["run_id"]},
        )
    if summary["state"].startswith("oom"):
        _show_out_of_memory(seen)
    _result(seen)


@st.fragment(run_every=REFRESH, key="run_live")
def _live(run_id: str) -> None:
    """Draw what changes while the run goes; the page is drawn again once it has ended."""
    with told_in_one_sentence():
        run = services.run_detail(run_id)
        if run is None:
            st.warning(f"There is no run {run_id} in this database.")
            return
        summary = run["summary"]
        over = str(summary["state"]) in services.FINAL_STATE_NAMES
        _headline(run)
        _history(run, over)
        if summary["kind"] == "limit" and not over:
            show_limit_progress(run, unit())
        _log(run)
        watched = st.session_state.get(WATCHED)
        st.session_state[WATCHED] = None if over else run_id
        if over and watched == run_id:
            st.rerun()


def _title(summary: Mapping[str, Any]) -> str:
    """Return the model that a run is of, without its owner; what was run where there is none."""
    model = services.run_words(summary)["model"]
    return str(model or summary["kind"]).rsplit("/", 1)[-1].replace("_", " ")


def _headline(run: Mapping[str, Any]) -> None:
    summary = run["summary"]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"### {state_badge(summary)} {_title(summary)}", width="stretch")
        show_actions(summary, with_link=False)
    if run.get("plan"):
        st.markdown(plan_line(run["plan"]))
    world = str(summary["world"])
    st.caption(
        f"Run {summary['id']} · {str(summary['kind']).replace('_', ' ')} · world {world} "
        f"({WORLD_WORDS[world]}) · attempt "
        f"{summary['attempt']} · {duration(summary) or 'not started'}"
    )
    if summary["why"]:
        st.caption(f"Why: {summary['why']}")
    if str(summary["state"]) == "queued" and not services.worker_alive():
        st.warning(
            "No worker is alive: the run waits. Start one with `peakmark worker`.",
            icon=":material/hourglass_empty:",
        )


def _history(run: Mapping[str, Any], over: bool) -> None:
    with st.container(horizontal=True, key="run_history"):
        for event in run["events"]:
            name = str(event["to"]).replace("_", " ")
            st.badge(f"{name} {clock(event['at_ms'])[11:]}", color="gray", icon=None)
    with st.expander("History", expanded=False, icon=":material/history:"):
        rows = [{**event, "at_ms": clock(event["at_ms"])} for event in run["events"]]
        st.dataframe(
            rows, hide_index=True, alt="State changes", column_config={"at_ms": "at (UTC)"}
        )


def _log(run: Mapping[str, Any]) -> None:
    text = log_tail(run["run_directory"])
    with (
        st.expander("Log", icon=":material/terminal:"),
        st.container(height=LOG_HEIGHT_PX, autoscroll=True),
    ):
        st.code(text or "No output yet on this host.", language=None)


def _result(run: Mapping[str, Any]) -> None:
    if run["error"]:
        _show_error(run)
    if (run["measured"] or {}).get("curves"):
        show_calibration(run)
    elif run["spec"]["kind"] == "attention":
        show_attention_result(run)
    elif run["measured"] and run["spec"]["kind"] == "decode":
        show_decode(run)
    elif run["measured"] and run["spec"]["kind"] == "serve":
        show_serving(run)
    elif run["measured"] and run["spec"]["kind"] == "profile":
        show_profile(run)
    elif run["measured"] and run["spec"]["kind"] == "quality":
        show_quality(run)
    elif (run["measured"] or {}).get("limit"):
        show_limit(run, unit())
    elif run["measured"]:
        for line in saved_lines(run["measured"]):
            st.text(line)
        _show_comparison(run)
    elif run["prediction"]:
        _show_prediction_only(run["prediction"])
    if run["plan"] and run["spec"]["kind"] not in ("profile", "limit"):
        with told_in_one_sentence():
            measured = (run["measured"] or {}).get("timeline") or ()
            show_measured_timeline(run["plan"], measured, unit())
    _show_documents(run)


def _show_error(run: Mapping[str, Any]) -> None:
    """Draw why a run ended; out of memory is a result, with the allocator's own numbers."""
    error, chosen = run["error"], unit()
    if not str(run["summary"]["state"]).startswith("oom"):
        st.error(str(error.get("message") or error.get("type") or "The job failed."))
        return
    st.warning(
        "Out of memory: this is a result. Below, what the allocator said when it gave up.",
        icon=":material/warning:",
    )
    numbers = {key: value for key, value in error.items() if key.endswith("_bytes")}
    if numbers:
        with metric_row():
            for key, value in numbers.items():
                label = key.removesuffix("_bytes").replace("_", " ")
                st.metric(label, "unknown" if value is None else size_text(value, chosen))
    if error.get("message"):
        st.caption(str(error["message"]))
    _show_out_of_memory(run)


def _show_out_of_memory(run: Mapping[str, Any]) -> None:
    verdict = (run["prediction"] or {}).get("verdict")
    if verdict:
        confirmed = verdict["state"] == "does_not_fit"
        word = "confirms" if confirmed else "**refutes**"
        st.markdown(f"Out of memory {word} the prediction: {sentence_in(verdict, unit())}")


def _show_comparison(run: Mapping[str, Any]) -> None:
    chosen, world = unit(), str(run["summary"]["world"])
    rows = comparison_rows(run["prediction"], run["measured"], world)
    if run["measured"].get("step_time_s"):
        _measured_metrics(run)
    if rows:
        with_errors = [
            {
                **row,
                "error_percent": error_percent(row["predicted_bytes"], row["measured_bytes"])
                if row["predicted_bytes"] is not None and row["measured_bytes"]
                else None,
            }
            for row in rows
        ]
        show_figure(
            comparison_figure(rows, chosen),
            key="comparison",
            title="Predicted and measured",
            caption=_counter_words(world),
            rows=with_errors,
        )
        show_figure(
            residual_figure(rows),
            key="residuals",
            title="How far off",
            caption="Signed error; to the right, the prediction was too high.",
            rows=with_errors,
        )
    phases = phase_rows(run["prediction"], run["measured"])
    if phases:
        show_figure(
            comparison_figure(phases, chosen),
            key="phase_comparison",
            title="Peak of each phase",
            caption="Allocated bytes at the high point of each phase: predicted hatched, "
            "measured filled.",
            rows=phases,
        )


def _counter_words(world: str) -> str:
    if world == "cpu":
        return (
            "State bytes of one rank: predicted hatched, measured filled. The CPU has no device "
            "counters, so the peak itself is not measured here."
        )
    return (
        "Worst rank: allocated, reserved and device bytes each against its own counter. Predicted "
        "hatched, measured filled."
    )


def _measured_metrics(run: Mapping[str, Any]) -> None:
    measured, prediction = run["measured"], run["prediction"] or {}
    speed = prediction.get("throughput") or {}
    with metric_row():
        st.metric("Measured step time", format_seconds(measured["step_time_s"]))
        if measured.get("tokens_per_s"):
            st.metric("Measured tokens per second", format_count(measured["tokens_per_s"]))
        if speed.get("step_time_s") and str(run["summary"]["world"]) in ("nccl", "solo"):
            st.metric(
                "Predicted step time",
                format_seconds(speed["step_time_s"]),
                help="For the plan's hardware; only the nccl world measures the same thing.",
            )
        losses = measured.get("losses") or ()
        if losses and losses[-1] is not None:
            st.metric("Last loss", f"{losses[-1]:.4f}")
    if None in losses:
        st.warning(
            f"The loss of measured step {list(losses).index(None) + 1} is not finite: memory and times "
            "are as good as any, but this training diverges. In our engine `checks_gradients=True` "
            "names the parameter whose gradient is not finite first.",
            icon=":material/warning:",
        )


def _show_prediction_only(prediction: Mapping[str, Any]) -> None:
    st.markdown(f"Predicted: {prediction['verdict']['sentence']}")
    st.caption("The measured side appears here when the run has ended.")


def _show_documents(run: Mapping[str, Any]) -> None:
    if run["plan"]:
        st.page_link(
            "app_pages/plan.py",
            label="Open its plan",
            icon=":material/straighten:",
            query_params=state.query_of_plan(run["plan"]),
        )
        st.button(
            "Add its plan to Compare",
            icon=":material/add:",
            key="compare_add_run",
            type="tertiary",
            on_click=add_plan,
            args=(run["plan"],),
        )
    if run["environment"]:
        with st.expander("Environment", icon=":material/developer_board:"):
            st.dataframe(
                [{"what": key, "value": _flat(v)} for key, v in sorted(run["environment"].items())],
                hide_index=True,
                alt="Environment of the run",
            )
    with st.expander("Spec", icon=":material/data_object:"):
        st.json(run["spec"], expanded=1)
    if run["measured"]:
        with st.expander("Everything measured", icon=":material/data_object:"):
            st.json(run["measured"], expanded=1)


def _flat(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
