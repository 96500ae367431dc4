"""The set of plans to compare: kept in the session, carried in the address, filled from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services, state
from app.compare_rows import run_plan
from app.components.current_plan import current_document
from app.components.header import current_values
from app.plan_links import LETTERS, packed, query_of_document, read_link, set_of
from planner.difference import MAX_PLANS
from planner.errors import PlanError

TRAY = "compare_tray"
PASTED, RUN = "compare_pasted", "compare_run"
PROBLEM = "compare_problem"
# A run's page is about the run's plan, which it adds itself; Compare has a button of its own.
PAGES_WITHOUT = ("Run", "Compare")


def tray() -> list[str]:
    """Return the plans to compare, each a packed link; the address gives them to a new session."""
    if TRAY not in st.session_state:
        st.session_state[TRAY] = set_of(st.query_params.to_dict())
    return list(st.session_state[TRAY])


def show_compare_button(page_title: str) -> None:
    """Draw the button that adds the current plan, and the way to the page that has any."""
    held = len(tray())
    if page_title in PAGES_WITHOUT:
        return
    st.button(
        "Add to Compare",
        icon=":material/add:",
        key="compare_add",
        type="tertiary",
        on_click=add_current,
        help="Adds this plan to the page Compare, beside up to three others.",
    )
    if held:
        st.page_link(
            "app_pages/compare.py", label=f"Compare {held}", icon=":material/compare_arrows:"
        )


def add_current() -> None:
    """Add the plan on the page; says in a toast what became of it."""
    try:
        st.toast(add_document(_document_here(), current_values()))
    except services.PROBLEMS as problem:
        st.toast(str(problem), icon=":material/error:")


def add_example() -> None:
    """Add the plan on the page and others that differ in one choice each; says in a toast what cannot be."""
    try:
        document = _document_here()
        for changes in examples_of(document):
            add_document({**document, "workload": {**document["workload"], **changes}})
    except services.PROBLEMS as problem:
        st.toast(str(problem), icon=":material/error:")


def _document_here() -> dict[str, Any]:
    """Return the plan on the page; raises PlanError while its model is not given."""
    document = current_document()
    if document is None:
        sentence = "Give a model first: the plan has none."
        raise PlanError("model", None, "given", sentence=sentence)
    return document


def examples_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a training plan's examples change of its workload: nothing, checkpointing, attention."""
    workload = document["workload"]
    if document["job"] != "train":
        return [{}, {"sequences": 2 * workload["sequences"]}]
    checkpointing = "none" if workload["checkpointing"] == "full" else "full"
    attention = "sdpa" if workload["attention"] == "eager" else "eager"
    return [{}, {"checkpointing": checkpointing, "checkpoint_every": 1}, {"attention": attention}]


def add_document(document: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> str:
    """Add a plan; return what became of it. Raises PlanError where it cannot be added."""
    return _add(packed(query_of_document(document, values or state.values_of_plan(document))))


def add_plan(document: Mapping[str, Any]) -> None:
    """Add a whole plan; says in a toast what became of it."""
    try:
        st.toast(add_document(document))
    except services.PROBLEMS as problem:
        st.toast(str(problem), icon=":material/error:")


def add_pasted() -> None:
    """Add what the pasted link shows: a plan, a run's plan, or all plans of a comparison.

    A link that cannot be used stays in its field, with the reason below it.
    """
    st.session_state.pop(PROBLEM, None)
    text = str(st.session_state.get(PASTED) or "")
    if not text.strip():
        return
    try:
        query = read_link(text)
        plans = set_of(query)
        if "run" in query or "row" in query:
            st.toast(add_document(run_plan(query.get("run"), query.get("row"))))
        elif plans:
            for plan in plans:
                st.toast(_add(plan))
        else:
            st.toast(_add(packed({key: query[key] for key in query if key != "unit"})))
    except services.PROBLEMS as problem:
        st.session_state[PROBLEM] = str(problem)
        return
    st.session_state[PASTED] = ""


def add_chosen_run() -> None:
    """Add the plan of the run that was chosen from the list."""
    chosen = st.session_state.get(RUN)
    st.session_state[RUN] = None
    if not chosen:
        return
    try:
        st.toast(add_document(run_plan(chosen, None)))
    except services.PROBLEMS as problem:
        st.toast(str(problem), icon=":material/error:")


def remove(index: int) -> None:
    """Take one plan out of the set."""
    held = tray()
    del held[index : index + 1]
    st.session_state[TRAY] = held


def _add(plan: str) -> str:
    held = tray()
    if plan in held:
        return f"That plan is there already, as {LETTERS[held.index(plan) % MAX_PLANS]}."
    if len(held) >= MAX_PLANS:
        sentence = f"{MAX_PLANS} plans are compared at most: remove one on the page Compare first."
        raise PlanError("compare", len(held) + 1, f"at most {MAX_PLANS} plans", sentence=sentence)
    st.session_state[TRAY] = [*held, plan]
    return f"Added as {LETTERS[len(held)]} on the page Compare."
