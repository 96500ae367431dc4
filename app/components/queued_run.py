"""A run that a button queued: once per press, and what became of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import streamlit as st

from app import services


def submit_once(submit: Callable[[str], str], *, key_name: str, last_name: str) -> None:
    """Queue a run once, however often its button is pressed before the page answers.

    `submit` takes the idempotency key, kept in the session under `key_name` until it is used, and
    returns the run's id; that or the problem is kept under `last_name`.
    """
    key = st.session_state.setdefault(key_name, uuid.uuid4().hex)
    try:
        run_id = submit(key)
    except services.PROBLEMS as problem:
        st.session_state[last_name] = {"problem": str(problem)}
        return
    st.session_state[last_name] = {"run": run_id}
    st.session_state[key_name] = uuid.uuid4().hex


def show_submitted(last_name: str) -> None:
    """Draw the queued run's link, or why there is none; nothing where no button was pressed."""
    last = st.session_state.get(last_name)
    if last and "problem" in last:
        st.error(last["problem"])
    elif last:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f":green[:material/check:] Run {last['run']} is queued.")
            st.page_link(
                "app_pages/run.py",
                label="Open the run",
                icon=":material/timeline:",
                query_params={"run": last["run"]},
            )
