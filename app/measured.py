"""Stored measurements as pages ask for them: all beside today's predictions, or one in full."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import streamlit as st

from app import services
from app.accuracy_job import AccuracyJob
from app.plan_words import plan_line
from app.ranking_rows import ranking_of
from db.measurements import measurements
from planner.accuracy import AccuracyReport
from planner.errors import PlanError
from planner.plan import parse_plan


def accuracy(wait_s: float | None = None) -> dict[str, Any]:
    """Compare today's predictions with every stored measurement.

    Beside the report, `names` says in a few words what each row measured, and `ranking` how good the choice
    of the alternative predicted to be fastest is. Where it takes longer
    than `wait_s`, only `done` and `total`, in measurements: ask again.
    """
    rows = [seen.to_row() for seen in measurements(services.database())]
    job = _accuracy_job(services.database_url())
    report = job.report(rows, wait_s)
    if report is None:
        return {"done": job.done(rows), "total": len(rows)}
    return _accuracy(json.dumps([row["id"] for row in rows]), report, rows)


@st.cache_resource(show_spinner=False)
def _accuracy_job(url: str) -> AccuracyJob:
    return AccuracyJob()


@st.cache_data(max_entries=4, show_spinner=False)
def _accuracy(digest: str, _report: AccuracyReport, _rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = {row["id"]: _row_words(row["spec"]) for row in _rows}
    return {**_report.to_dict(), "names": names, "ranking": ranking_of(_rows, _report)}


def _row_words(spec: Mapping[str, Any]) -> str:
    asked: Mapping[str, Any] = next(
        filter(None, map(spec.get, ("plan", "decode", "serve", "quality"))), {}
    )
    model = asked.get("model")
    if not model:
        return str(spec.get("kind", ""))
    name = str(model.get("preset") or model.get("name", "custom model")).rsplit("/", 1)[-1]
    whole = _whole_plan(spec.get("plan"))
    return f"{name}: {spec.get('kind') if whole is None else plan_line(whole)}"


def _whole_plan(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a stored plan with its defaults written out; None where it cannot be planned."""
    with suppress(PlanError):
        return None if plan is None else parse_plan(plan).to_dict()
    return None


def measurement_detail(row_id: str) -> dict[str, Any] | None:
    """Return a stored measurement as `run_detail` returns a run; None when there is none.

    One that a run of this database made has that run's id in `run_id`; one that was recorded
    elsewhere has no history, and today's prediction beside it.
    """
    seen = next((m for m in measurements(services.database()) if m.id == row_id), None)
    if seen is None:
        return None
    plan = _whole_plan(seen.spec.get("plan"))
    return {
        "run_id": seen.run_id,
        "recorded_at": seen.recorded_at,
        "role": str(seen.role),
        "summary": {
            "id": seen.id,
            "state": str(seen.outcome),
            "world": str(seen.spec["world"]),
            "cancelling": False,
            "model_name": _row_words(seen.spec).split(":")[0],
        },
        "spec": seen.spec,
        "plan": plan,
        "prediction": None if plan is None else services.prediction_of(parse_plan(plan)),
        "measured": seen.measured,
        "environment": seen.environment,
        "error": None,
    }
