"""Prove it: queue the run of the batch or of the trace that the Serving page shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import services, serving_job
from app.components.queued_run import show_submitted, submit_once
from app.serving_rows import TraceChoice
from planner.plan import Plan
from planner.serving_levers import ServingPoint

LAST_RUN, RUN_KEY = "serving_last_run", "serving_run_key"
START_WORKER = "peakmark worker"


def show_serving_run(plan: Plan, point: ServingPoint, choice: TraceChoice) -> None:
    """Draw the two buttons that prove the page, or why nothing here can."""
    has_gpu = bool(services.attached())
    world = "solo" if has_gpu else "cpu"
    reason = serving_job.unprovable(point, world)
    with st.container(border=True, key="serving_run"):
        with st.container(horizontal=True, vertical_alignment="center"):
            place = "on the attached GPU" if has_gpu else "on the CPU"
            st.markdown(f"**Prove it {place}**, with random weights", width="stretch")
            _button(
                f"Decode {point.batch:,} at once",
                "serving_prove_decode",
                reason,
                lambda: serving_job.decode_spec(plan, point, world),
            )
            _button(
                "Serve the trace",
                "serving_prove_serve",
                reason,
                lambda: serving_job.serve_spec(plan, point, choice, world),
            )
        if reason:
            st.caption(reason)
        elif not has_gpu:
            st.caption(
                "No GPU is attached: on the CPU a run shows that tokens, pages and preemptions are right, in "
                "fp32 with plain torch; its times say nothing of a GPU."
            )
        show_submitted(LAST_RUN)
        if not services.worker_alive():
            st.caption(f"No worker is alive, so a run would wait; start one with `{START_WORKER}`.")


def _button(label: str, key: str, reason: str | None, make: Callable[[], dict[str, Any]]) -> None:
    st.button(
        label,
        type="primary",
        icon=":material/play_arrow:",
        key=key,
        disabled=bool(reason),
        on_click=_submit,
        args=(make,),
    )


def _submit(make: Callable[[], dict[str, Any]]) -> None:
    submit_once(
        lambda key: serving_job.queue(services.database(), make(), key=key),
        key_name=RUN_KEY,
        last_name=LAST_RUN,
    )
