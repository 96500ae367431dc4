"""Predictions of plans, kept per plan and per calibration that was made on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import streamlit as st

from app.own_calibration import calibrations_made_here
from db.database import Database
from db.problems import DatabaseProblem
from planner.memory.recorder import begin_to_load
from planner.plan import Plan, plan_hash
from planner.predict import predict
from planner.speed.calibrated import rates_of
from planner.speed.own import OwnCalibration, calibrated

PlanKey = tuple[str, str | None]
# A calibration that has just been made is seen after that long at most.
_KEPT_S = 30


@st.cache_resource(show_spinner=False)
def begin_at_full_speed() -> None:
    """Begin to load what replays allocators fast, once per server: first answers come in half the time."""
    begin_to_load()


def prediction_here(plan: Plan, database: Callable[[], Database]) -> dict[str, Any]:
    """Return the prediction of a plan as plain data, timed at the rates measured here if there are any.

    Where there is no database nothing was measured.
    """
    timed = with_calibration(plan, database)
    return _prediction(plan_key(timed), timed)


def with_calibration(plan: Plan, database: Callable[[], Database]) -> Plan:
    """Return a plan whose GPU has what was measured on its kind here; nothing where there is no database."""
    own = None
    with suppress(DatabaseProblem):
        opened = database()
        own = _made_here(str(opened.url), opened).get(plan.hardware.id)
    return replace(plan, hardware=calibrated(plan.hardware, own))


def rates_words(plan: Plan) -> str:
    """Return at which rates everything of a plan is timed, as a sentence."""
    return f"Times: {rates_of(plan.hardware).source}."


def plan_key(plan: Plan) -> PlanKey:
    """Return what tells a plan's figures from another's: its document, and the calibration of its GPU."""
    own = plan.hardware.calibration
    return plan_hash(plan), own.source if own else None


@st.cache_resource(ttl=_KEPT_S, show_spinner=False)
def _made_here(url: str, _database: Database) -> dict[str, OwnCalibration]:
    return calibrations_made_here(_database)


@st.cache_data(max_entries=500, show_spinner=False)
def _prediction(key: PlanKey, _plan: Plan) -> dict[str, Any]:
    return predict(_plan).to_dict()
