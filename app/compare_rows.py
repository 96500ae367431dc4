"""What the Compare page shows, as plain data: links planned, and the plans of runs."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import measured, services
from app.plan_links import document_of, unpacked
from planner.difference import ComparedPlan, compare_plan
from planner.errors import PlanError, describe_value

HUB_TTL_S = 300


def planned(link: str) -> ComparedPlan:
    """Plan what a packed link says; what cannot be read or planned has a sentence instead."""
    query = unpacked(link)
    if link.strip() and not query:
        sentence = f"The link's plan {describe_value(link)} says nothing of a plan: remove it."
        return ComparedPlan(document={}, refusal=sentence)
    try:
        document = document_of(query, _fetched)
    except PlanError as error:
        return ComparedPlan(document={}, refusal=str(error))
    return compare_plan(document, services.prediction_of)


def _fetched(hub_id: str) -> dict[str, Any]:
    config, sentence = _from_hub(hub_id)
    if sentence is not None:
        raise PlanError("model.hub", hub_id, "a public model", sentence=sentence)
    return config


@st.cache_data(max_entries=20, ttl=HUB_TTL_S, show_spinner=False)
def _from_hub(hub_id: str) -> tuple[dict[str, Any], str | None]:
    """Return a model's configuration or why there is none; a failure is kept too, as it takes long."""
    try:
        return services.hub_config(hub_id), None
    except PlanError as error:
        return {}, str(error)


def run_plan(run_id: str | None, row_id: str | None) -> dict[str, Any]:
    """Return the plan of a run or of a stored measurement; raises PlanError where it has none."""
    found = services.run_detail(run_id) if run_id else measured.measurement_detail(row_id or "")
    name = f"run {run_id}" if run_id else f"measurement {row_id}"
    if found is None:
        sentence = f"There is no {name} in this database."
        raise PlanError("run", run_id or row_id, "the id of a run", sentence=sentence)
    if found["plan"] is None:
        sentence = f"The {name} has no plan that can be compared: it ran something else."
        raise PlanError("run", run_id or row_id, "a run of a plan", sentence=sentence)
    return dict(found["plan"])


def runs_with_plans(limit: int = 50) -> list[dict[str, Any]]:
    """Return id and words of the newest runs that have a plan."""
    runs = services.run_lines(limit=limit)
    found = [(run, services.run_words(run)["plan"]) for run in runs if run["model_name"]]
    return [
        {"id": run["id"], "words": f"{str(run['model_name']).rsplit('/', 1)[-1]}: {words}"}
        for run, words in found
        if words
    ]
