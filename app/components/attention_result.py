"""What a run of the job attention measured, variant by variant, beside its prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.attention_job import answer_of_run
from app.attention_rows import table_rows
from app.components.attention_form import problem_line
from app.components.attention_view import in_unit
from app.components.figure import show_table
from planner.attention.measured import seen_in_row


def show_attention_result(run: Mapping[str, Any]) -> None:
    """Draw the table of a run's variants; one whose spec is of another version has none."""
    found = answer_of_run(run["spec"], run["prediction"], run["environment"])
    if found is None:
        return
    seen = seen_in_row(
        run["spec"], run["measured"] or {}, run["environment"] or {}, row=None, here=True
    )
    st.markdown(problem_line(found.problem))
    lines = table_rows(found, {one.variant: one for one in seen})
    show_table([in_unit(line) for line in lines], key="attention_result", title="Variants")
    on_cpu = str(run["summary"]["world"]) == "cpu"
    st.caption(
        f"Predicted for {found.gpu.name}; peaks are bytes that tensors ask for beside Q, K, V and the "
        "output's gradient. "
        + ("Measured on a CPU: its errors compare, its times do not." if on_cpu else "")
    )
    skipped = {
        name: row["reason"]
        for name, row in ((run["measured"] or {}).get("kernels") or {}).items()
        if row["outcome"] == "skipped"
    }
    for name, reason in skipped.items():
        st.caption(f":material/info: {name} did not run: {reason}")
