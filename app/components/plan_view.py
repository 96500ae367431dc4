"""The Plan page: the form in the sidebar, which folds on a phone, and the answer beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import streamlit as st

from app import services, state
from app.cli_line import cli_line, is_plain_preset
from app.components.answer import (
    show_breakdown,
    show_ledger,
    show_serving_answer,
    show_training_answer,
)
from app.components.export_box import show_export_box
from app.components.figure import show_table
from app.components.hardware_form import hardware_form
from app.components.header import current_values, unit
from app.components.levers_view import show_levers, show_remedies
from app.components.model_form import model_form
from app.components.problems import told_in_one_sentence
from app.components.proof_box import show_proof_box
from app.components.verdict import show_verdict
from app.components.workload_form import (
    job_form,
    parallelism_form,
    replicas_form,
    serving_form,
    training_form,
)
from planner.paper import paper_table
from planner.plan import Plan


def show_plan_page() -> None:
    """Draw form and answer."""
    document = _form()
    if document is None:
        st.info("Give a model in the form to see its plan.", icon=":material/arrow_back:")
        return
    with told_in_one_sentence():
        plan = services.check_plan(document)
        _answer(plan, services.prediction_of(plan))


def _form() -> dict[str, Any] | None:
    """Draw the form; return the plan as entered, None while its model is missing or wrong."""
    model = None
    with st.sidebar:
        with told_in_one_sentence():
            model = model_form()
        job = job_form()
        if job == "train":
            training_form()
            parallelism_form()
        else:
            serving_form()
            replicas_form()
        hardware = hardware_form()
    if model is None:
        return None
    return state.plan_mapping(current_values(), model, hardware)


def _answer(plan: Plan, prediction: Mapping[str, Any]) -> None:
    chosen = unit()
    fits = prediction["verdict"]["state"] == "fits"
    # Both are filled last: they take a second where everything else is there at once.
    remedies = st.empty()
    if plan.job == "train":
        if not fits:
            remedies.caption("Looking for the smallest change that makes it fit …")
        left, right = st.columns([3, 2])
        with left:
            show_verdict(prediction, chosen)
        with right, told_in_one_sentence():
            show_proof_box(plan, prediction, chosen)
    else:
        show_verdict(prediction, chosen)
    for note in prediction["notes"]:
        st.caption(f":material/info: {note}")
    show_breakdown(prediction, chosen)
    levers = st.container()
    if plan.job == "train":
        show_training_answer(plan, prediction, chosen)
    else:
        show_serving_answer(prediction, chosen)
    show_ledger(prediction, chosen)
    _take_away(plan, prediction)
    if plan.job == "train":
        _paper_view(prediction)
        if not fits:
            with remedies.container(), told_in_one_sentence():
                show_remedies(plan, chosen)
        with levers, told_in_one_sentence():
            show_levers(plan, chosen)


def _take_away(plan: Plan, prediction: Mapping[str, Any]) -> None:
    """Draw the downloads and the command that gives the same answer."""
    document = plan.to_dict()
    with st.container(horizontal=True):
        show_export_box(plan)
        st.download_button(
            "Prediction as JSON",
            data=json.dumps(prediction, indent=1),
            file_name="peakmark-prediction.json",
            mime="application/json",
            icon=":material/download:",
            on_click="ignore",
        )
        st.download_button(
            "Plan as JSON",
            data=json.dumps(document, indent=1),
            file_name="peakmark-plan.json",
            mime="application/json",
            icon=":material/download:",
            on_click="ignore",
        )
        if not is_plain_preset(document):
            st.download_button(
                "config.json",
                data=json.dumps(dict(plan.model.hf_config), indent=1),
                file_name="config.json",
                mime="application/json",
                icon=":material/download:",
                on_click="ignore",
            )
    st.caption("The same answer on the command line:")
    st.code(cli_line(document), language="bash", wrap_lines=True)


def _paper_view(prediction: Mapping[str, Any]) -> None:
    with st.expander("ZeRO paper view", icon=":material/article:"):
        st.caption(
            "What the ZeRO paper's formula says of this parameter count: 2 + 2 + 12 bytes per "
            "parameter for bf16 parameters, gradients and optimizer states, in decimal GB per "
            "GPU. It knows no activations, logits, buffers or context: it is not the prediction."
        )
        model = prediction["model"]
        rows = [asdict(row) for row in paper_table({model["name"]: model["parameters"]})]
        show_table(rows, key="paper")
