"""Predictions of plans, kept per plan and per calibration that was made on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import streamlit as st

from app.own_calibration import calibrations_made_here
from db.database import Database
from db.problems import DatabaseProblem
from planner.plan import Plan, plan_hash
from planner.predict import predict
from planner.speed.own import OwnCalibration

# A calibration that has just been made is seen after that long at most.
_KEPT_S = 30


def prediction_here(plan: Plan, database: Callable[[], Database]) -> dict[str, Any]:
    """Return the prediction of a plan as plain data, timed at the rates measured here if there are any.

    Where there is no database nothing was measured.
    """
    own = None
    with suppress(DatabaseProblem):
        opened = database()
        own = _made_here(str(opened.url), opened).get(plan.hardware.id)
    return _prediction(plan_hash(plan), own.source if own else None, plan, own)


@st.cache_resource(ttl=_KEPT_S, show_spinner=False)
def _made_here(url: str, _database: Database) -> dict[str, OwnCalibration]:
    return calibrations_made_here(_database)


@st.cache_data(max_entries=500, show_spinner=False)
def _prediction(
    digest: str, source: str | None, _plan: Plan, _own: OwnCalibration | None
) -> dict[str, Any]:
    return predict(_plan, own=_own).to_dict()
