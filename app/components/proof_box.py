"""Prove it: choose a world and queue the real run of the plan on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services
from app.charts.style import size_text
from app.components.queued_run import show_submitted, submit_once
from app.proof import (
    gpu_only,
    host_memory_free_bytes,
    host_memory_needed_bytes,
    small_proof,
    unprovable,
)
from planner.plan import Plan
from planner.workload import Engine

WORLD_HELP = (
    "nccl: one process per GPU, honest for everything. shared: all ranks on one GPU. solo: one "
    "rank alone on one GPU, honest for that rank's memory. cpu: all ranks on the CPU, honest for "
    "numerics and state bytes only."
)
START_WORKER = "peakmark worker"
LAST_RUN = "last_run"
SAVE_TO, LOAD_FROM = "proof_save_to", "proof_load_from"
FOLDER_HELP = (
    "A folder by its absolute path on the worker's host. A run saves its last step there as "
    "step-NNNNNNNN and replaces none; it goes on from the newest whole one, at any number of ranks "
    "and stage."
)
PROOF_KEY = "proof_key"


def show_proof_box(plan: Plan, prediction: Mapping[str, Any], unit: str) -> None:
    """Draw the choice of world and the button that starts the real run."""
    reason = unprovable(plan)
    if reason is not None:
        st.caption(reason)
        return
    gpus = len(services.attached())
    worlds = possible_worlds(gpus, plan.parallelism.world_size)
    with st.container(border=True, key="proof"):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            world = st.segmented_control(
                "Prove it on the machine at hand",
                worlds,
                default=worlds[0],
                required=True,
                key="proof_world",
                help=WORLD_HELP,
            )
            problem = gpu_only(plan) if world == "cpu" else None
            reason = _too_big_for_host(plan, prediction, world, unit)
            st.button(
                "Prove it",
                type="primary",
                icon=":material/play_arrow:",
                key="prove",
                disabled=bool(problem or reason),
                on_click=_submit,
                args=(plan, world),
            )
        if plan.parallelism.engine is Engine.PEAKMARK:
            _ask_for_folders()
        if problem is not None:
            st.caption(str(problem))
        elif reason and plan.model.trace is not None:
            st.caption(reason)
        elif reason:
            _offer_small_proof(plan, reason)
        _show_outcome(gpus)


def possible_worlds(gpus: int, world_size: int) -> tuple[str, ...]:
    """Return the worlds in which a plan can run beside `gpus` attached GPUs, the best first."""
    if gpus == 0:
        return ("cpu",)
    whole = ("nccl",) if gpus >= world_size else ()
    return (*whole, "solo", "shared", "cpu")


def _ask_for_folders() -> None:
    """Ask where to save the trained step, and from which one to go on."""
    with st.expander("Save its training, or go on from a saved one", icon=":material/save:"):
        left, right = st.columns(2)
        with left:
            st.text_input("Save to", key=SAVE_TO, placeholder="/data/steps", help=FOLDER_HELP)
        with right:
            st.text_input("Go on from", key=LOAD_FROM, placeholder="/data/steps", help=FOLDER_HELP)


def _folders(plan: Plan) -> dict[str, str | None]:
    if plan.parallelism.engine is not Engine.PEAKMARK:
        return {}
    asked = {"save_to": SAVE_TO, "load_from": LOAD_FROM}
    return {name: st.session_state.get(key) or None for name, key in asked.items()}


def _too_big_for_host(
    plan: Plan, prediction: Mapping[str, Any], world: str, unit: str
) -> str | None:
    """Return why a run on the CPU would not fit this host; None when it would."""
    if world != "cpu":
        return None
    ranks = plan.parallelism.world_size
    needed = host_memory_needed_bytes(prediction, ranks)
    free = host_memory_free_bytes()
    if needed <= free:
        return None
    return (
        f"Too big for the CPU world: {ranks} {'rank' if ranks == 1 else 'ranks'} would hold about "
        f"{size_text(needed, unit)}, this host can give {size_text(free, unit)}."
    )


def _offer_small_proof(plan: Plan, reason: str) -> None:
    st.caption(
        f"{reason} A small proof runs the same engine, stage, optimizer, precision and attention "
        "on a two-layer model of this family: it checks that these work and that their state "
        "bytes are as predicted, not this plan's peak."
    )
    st.button(
        "Run the small proof on the CPU",
        icon=":material/play_arrow:",
        key="prove_small",
        on_click=_submit_small,
        args=(plan,),
    )


def _submit(plan: Plan, world: str) -> None:
    submit_once(
        lambda key: services.submit_proof(plan, world, key, **_folders(plan)),
        key_name=PROOF_KEY,
        last_name=LAST_RUN,
    )


def _submit_small(plan: Plan) -> None:
    _submit(small_proof(plan), "cpu")


def _show_outcome(gpus: int) -> None:
    show_submitted(LAST_RUN)
    where = "no GPU is attached to this machine" if gpus == 0 else f"{gpus} GPU(s) attached"
    if services.worker_alive():
        st.caption(f"A worker is ready; {where}.")
    else:
        st.caption(
            f"No worker is alive, so a run would wait; start one with `{START_WORKER}` ({where})."
        )
