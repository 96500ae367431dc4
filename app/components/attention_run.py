"""Measure it: queue the run of the chosen variants on the machine at hand."""

from __future__ import annotations

import streamlit as st

from app import attention_rows, services
from app.attention_job import runnable, too_big_for_host
from app.components.queued_run import show_submitted, submit_once
from planner.attention.answer import AttentionAnswer

LAST_RUN, RUN_KEY = "attention_last_run", "attention_run_key"
START_WORKER = "peakmark worker"


def show_run_box(found: AttentionAnswer) -> None:
    """Draw the button that measures the variants, and what a GPU would add where there is none."""
    has_gpu = bool(services.attached())
    world = "nccl" if has_gpu else "cpu"
    variants = runnable(found, world)
    reason = None if has_gpu else too_big_for_host(found)
    with st.container(border=True, key="attention_run"):
        with st.container(horizontal=True, vertical_alignment="center"):
            names = ", ".join(attention_rows.variant_name(variant) for variant in variants)
            place = "on the attached GPU" if has_gpu else "on the CPU"
            st.markdown(f"**Measure it {place}:** {names or 'nothing'}", width="stretch")
            st.button(
                "Measure",
                type="primary",
                icon=":material/play_arrow:",
                key="attention_measure",
                disabled=bool(reason) or not variants,
                on_click=_submit,
                args=(found, world),
            )
        if not has_gpu:
            st.caption(
                "No GPU is attached. With one, every variant is run here, one after the other: median times "
                "of forward and backward, peak bytes, which backend ran, and errors against float64, also "
                "where a variant runs out of memory. On the CPU eager and sdpa run, for their errors."
            )
        if reason:
            st.caption(reason)
        _show_outcome()


def _submit(found: AttentionAnswer, world: str) -> None:
    submit_once(
        lambda key: attention_rows.submit(found, world, key=key),
        key_name=RUN_KEY,
        last_name=LAST_RUN,
    )


def _show_outcome() -> None:
    show_submitted(LAST_RUN)
    if not services.worker_alive():
        st.caption(f"No worker is alive, so a run would wait; start one with `{START_WORKER}`.")
