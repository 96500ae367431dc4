"""What changes of the algorithm and of the system did to a model's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.components.figure import show_table
from planner.quality_run import (
    QUALITY_COLUMNS,
    Variable,
    quality_cells,
    quality_sentences,
    quality_title,
)

_TITLES = {
    Variable.SYSTEM: "System variables: the same model, run otherwise",
    Variable.ALGORITHM: "Algorithm variables: another model",
}


def show_quality(run: Mapping[str, Any]) -> None:
    """Draw the sentences, and for every model a table per kind of variable, each with CSV."""
    measured = run["measured"]
    models = measured.get("models") or {}
    if not models:
        return
    for line in quality_sentences(measured):
        st.markdown(line)
    for number, (name, part) in enumerate(models.items()):
        st.markdown(f"**{quality_title(name, part)}**")
        rows = [dict(zip(QUALITY_COLUMNS, cells, strict=True)) for cells in quality_cells(part)]
        exact = rows[0]
        for variable, title in _TITLES.items():
            shown = [row for row in rows if row["variable"] == variable]
            if shown:
                st.caption(title)
                key = f"quality_{variable}_{number}"
                show_table([exact, *shown], key=key, title=f"{title}, {name}")
    st.caption(
        "KL: how far the distribution of the next token moves, in nats, mean over positions. Recall near: "
        "share of right answers to what lies within the window; far: to the rest. "
        "'Trained with it': far recall of a model trained with the change from the start. Rounding: at most "
        f"four times what two exact ways differ by ({_floors(models)})."
    )


def _floors(models: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {part['floor']:.1e}" for name, part in models.items())
