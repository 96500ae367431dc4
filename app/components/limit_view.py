"""The largest that fits on the pages: the buttons that prove it, how far that is, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import services
from app.charts.limit import limit_figure
from app.charts.style import size_text
from app.components.figure import show_figure
from app.components.queued_run import show_submitted, submit_once
from app.limit_proof import limit_spec, limit_world
from app.limit_rows import TRIAL_COLUMNS, trial_cells
from app.run_logs import trials_so_far
from db import repository
from planner.errors import PlanError
from planner.limit_run import limit_sentence
from planner.plan import Plan, parse_plan
from planner.reach import Reach

LAST, KEY = "limit_last", "limit_key"
CAPTION = (
    "Each point is a run of three training steps in new processes. Device bytes of the worst GPU: "
    "predicted hollow, measured filled; a cross ran out of memory and stands at what was predicted."
)


def show_reaches(plan: Plan, found: Sequence[Reach]) -> None:
    """Draw how far a plan goes, each with the button that proves it by short runs."""
    st.markdown("**How far it goes**, all else as planned")
    world, lacking = None, None
    try:
        world = limit_world(plan, None)
    except PlanError as problem:
        lacking = str(problem)
    for reach in found:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(reach.sentence(), width="stretch")
            if world is not None:
                st.button(
                    "Prove it by short runs",
                    key=f"prove_limit_{reach.name}",
                    help="Queues a search: runs of three steps, from the largest value predicted to run "
                    "at all, until one runs and the next is out of memory.",
                    on_click=_submit,
                    args=(plan, reach, world),
                )
    if lacking is not None:
        st.caption(f"Not to be proven here: {lacking}")
    show_submitted(LAST)


def _submit(plan: Plan, reach: Reach, world: str) -> None:
    submit_once(
        lambda key: repository.create_run(
            services.database(),
            limit_spec(plan, reach, world),
            plan.to_dict(),
            services.prediction_of(plan),
            idempotency_key=key,
            who="page",
        ),
        key_name=KEY,
        last_name=LAST,
    )


def show_limit_progress(run: Mapping[str, Any], unit: str) -> None:
    """Draw the runs of a search that is under way; nothing before the first has ended."""
    trials = trials_so_far(run["run_directory"])
    if trials:
        st.caption(f"{len(trials)} of at most {run['spec']['limit']['max_runs']} short runs")
        cells = trial_cells({"trials": trials}, lambda size: size_text(size, unit))
        st.dataframe(
            pd.DataFrame(cells, columns=list(TRIAL_COLUMNS)), hide_index=True, alt="Runs so far"
        )


def show_limit(run: Mapping[str, Any], unit: str) -> None:
    """Draw a limit proven and predicted, and the runs that showed it."""
    found = run["measured"]["limit"]
    st.markdown(f"#### {limit_sentence(found)}")
    cells = trial_cells(found, lambda size: size_text(size, unit))
    if cells:
        rows = [dict(zip(TRIAL_COLUMNS, line, strict=True)) for line in cells]
        capacity_bytes = parse_plan(run["plan"]).hardware.visible_bytes
        show_figure(
            limit_figure(found, capacity_bytes, unit),
            key="limit",
            title="Short runs on the predicted curve",
            caption=CAPTION,
            rows=rows,
        )
