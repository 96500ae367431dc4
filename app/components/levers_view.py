"""Levers on the Plan page: what would make it fit, what single changes save and cost, how far it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app.charts.style import size_text
from app.components.figure import show_table
from app.components.limit_view import show_reaches
from app.lever_rows import lever_lines, levers_like, reaches_of
from app.predictions import rates_words
from app.state import DEFAULTS, DIMENSIONS, values_of_plan
from planner.levers import Lever
from planner.plan import Plan

SHOWN = 5


def show_remedies(plan: Plan, unit: str) -> None:
    """Draw the smallest changes that make a plan fit, each a button that makes it."""
    found = levers_like(plan)
    with st.container(border=True, key="remedies"):
        st.markdown("#### What would make it fit?")
        if found["fixes"]:
            st.caption(
                f"{_number(found['fixes'][0])}, the smallest first: on as few GPUs, with "
                "nothing else changed, in the least time."
            )
            _buttons(plan, found["fixes"], "fix", unit)
        else:
            st.markdown(_hopeless(found["closest"], unit))
        if found["algorithm_fixes"]:
            st.caption("Or another model or training (algorithm variables):")
            _buttons(plan, found["algorithm_fixes"], "algorithm_fix", unit)


def _number(lever: Lever) -> str:
    """Return of how many changes a lever is, in words."""
    words = lever.change.words
    return "Three changes" if ", " in words else "Two changes" if " and " in words else "One change"


def _hopeless(closest: Sequence[Lever], unit: str) -> str:
    if not closest:
        return "No single change of this plan can be planned."
    size = size_text(closest[0].device_bytes, unit)
    return (
        f"No three changes make it fit. Closest is **{closest[0].change.words}**, which still needs "
        f"{size} per GPU."
    )


def show_levers(plan: Plan, unit: str) -> None:
    """Draw the ranked single changes: what each saves and costs, one click to make it."""
    found = levers_like(plan)
    with st.container(border=True, key="levers"):
        st.markdown("#### Levers")
        st.caption(
            "Single changes of the system, which computes the same but for what stands in brackets: what "
            "each saves on every GPU and costs in time, by a prediction of its own that keeps the "
            f"sequences of a step and takes this plan's share of segments. {rates_words(plan)}"
        )
        left, right = st.columns(2)
        with left:
            st.markdown("**Saves memory**")
            _buttons(plan, found["memory"][:SHOWN], "lever_memory", unit)
        with right:
            st.markdown("**Saves time, and fits**")
            if found["time"]:
                _buttons(plan, found["time"][:SHOWN], "lever_time", unit)
            else:
                st.caption("No single change is faster and fits.")
        st.caption("Changes of the algorithm, which make it another model or training:")
        _buttons(plan, found["algorithm"][:SHOWN], "lever_algorithm", unit)
        with st.popover("All of them", icon=":material/table:", type="tertiary"):
            every = {
                lever.change.words: lever
                for name in ("memory", "time", "algorithm")
                for lever in found[name]
            }
            lines = lever_lines(list(every.values()), lambda size: size_text(size, unit))
            show_table(lines, key="levers_all", title="Levers")
        show_reaches(plan, reaches_of(plan))


def _buttons(plan: Plan, levers: Sequence[Lever], key: str, unit: str) -> None:
    """Draw each lever in words beside a button; a click sets the form to its plan."""
    before = values_of_plan(plan.to_dict())
    for number, lever in enumerate(levers):
        # A button's own words are cut off on a phone: they stand beside it.
        with st.container(
            horizontal=True, wrap=False, vertical_alignment="center", key=f"{key}_row_{number}"
        ):
            st.markdown(lever_sentence(lever, unit), width="stretch")
            st.button(
                "Apply",
                key=f"{key}_{number}_{lever.change.words}",
                help=_help(lever, unit),
                on_click=_apply,
                args=(changed_values(before, values_of_plan(lever.plan.to_dict())),),
            )


def lever_sentence(lever: Lever, unit: str) -> str:
    """Return a change, what it saves and costs, and what else it changes."""
    effect = lever.effect(lambda size: size_text(size, unit)).replace("-", "−")
    besides = f" :gray[({lever.change.caution})]" if lever.change.caution else ""
    return f"**{lever.change.words}**: {effect}{besides}"


def _help(lever: Lever, unit: str) -> str:
    verdict = str(lever.state).replace("_", " ")
    return f"Then needs {size_text(lever.device_bytes, unit)} per GPU: {verdict}."


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form's values that a change sets: a model or GPU stays named as it was."""
    known = {*DEFAULTS, *DIMENSIONS}
    return {
        key: value
        for key, value in after.items()
        if key in known and (key not in before or before[key] != value)
    }


def _apply(values: Mapping[str, Any]) -> None:
    """Set the form; callbacks run before the widgets are drawn."""
    for key, value in values.items():
        st.session_state[key] = value
