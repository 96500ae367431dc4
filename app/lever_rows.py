"""What the Plan page shows of levers, as plain data kept per plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from app.predictions import PlanKey, plan_key
from planner.changes import Kind
from planner.levers import Lever, levers_of, of_kind, remedies, saving, speeding
from planner.plan import Plan
from planner.predict import predict
from planner.reach import REACHES, Reach, largest_that_fits
from planner.verdict import State

Show = Callable[[int], str]


def levers_like(plan: Plan) -> dict[str, list[Lever]]:
    """Return a training plan's levers by what they are for, each list the most useful first."""
    return _levers(plan_key(plan), plan)


@st.cache_data(max_entries=100, show_spinner=False)
def _levers(key: PlanKey, _plan: Plan) -> dict[str, list[Lever]]:
    before = predict(_plan)
    levers = levers_of(_plan, before, replay=False)
    system, capacity_bytes = of_kind(levers, Kind.SYSTEM), _plan.hardware.visible_bytes
    fits = before.verdict.state is State.FITS
    found = None if fits else remedies(_plan, levers, before)
    return {
        "memory": saving(system, capacity_bytes),
        "time": speeding(system),
        "algorithm": of_kind(levers, Kind.ALGORITHM),
        "fixes": [] if found is None else [*found.system],
        "algorithm_fixes": [] if found is None else [*found.algorithms],
        "closest": [] if found is None or found.closest is None else [found.closest],
    }


def reaches_of(plan: Plan) -> list[Reach]:
    """Return the largest micro-batch, sequence and model that fit, kept per plan."""
    return _reaches(plan_key(plan), plan)


@st.cache_data(max_entries=100, show_spinner=False)
def _reaches(key: PlanKey, _plan: Plan) -> list[Reach]:
    return [largest_that_fits(_plan, name) for name in REACHES]


def lever_lines(levers: Sequence[Lever], show: Show) -> list[dict[str, Any]]:
    """Return levers as lines of a table, sizes as `show` writes them."""
    verdicts: Mapping[str, str] = {"does_not_fit": "does not fit"}
    return [
        {
            "change": lever.change.words,
            "memory per GPU": f"{'−' if lever.saved_bytes >= 0 else '+'}{show(abs(lever.saved_bytes))}",
            "time": lever.time_words(),
            "then needs": show(lever.device_bytes),
            "verdict": verdicts.get(str(lever.state), str(lever.state)),
            "of the": str(lever.change.kind),
            "besides": lever.change.caution,
        }
        for lever in levers
    ]
