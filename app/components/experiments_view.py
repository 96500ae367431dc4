"""The Experiments page: groups of repeats against a baseline, and what may be concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import streamlit as st

from app import experiment_rows, services
from app.charts.experiments import repeats_figure
from app.charts.style import axis_unit, size_text
from app.components.experiment_form import add_runs, choose_experiment, offer_example, remove_runs
from app.components.figure import show_figure
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from app.experiment_rows import Analysis
from planner.experiments.conditions import clocks_of
from planner.experiments.groups import known_figures
from planner.experiments.lines import FIGURES

# Longer tables scroll.
MOST_ROWS_WHOLE, TABLE_HEIGHT_PX = 12, 460
WHAT_KINDS_MEAN = (
    "An **algorithm** variable changes what the model computes or how it is trained (precision, GQA, "
    "windows, sparse or linear attention, quantised caches); a **system** variable only how the same is "
    "computed (kernel, engine, ZeRO stage, paging, checkpointing, world); **work** is how much is computed."
)


def show_experiments_page() -> None:
    """Draw the chosen experiment."""
    with told_in_one_sentence():
        st.caption(WHAT_KINDS_MEAN)
        chosen = choose_experiment()
        if chosen is None:
            st.info(
                "An experiment is a named set of runs. Make one and put runs of this machine or "
                "measurements that came with Peakmark into it.",
                icon=":material/science:",
            )
            offer_example()
            return
        analysis = experiment_rows.analyse(services.database(), chosen)
        add_runs(chosen, is_empty=not analysis.members)
        for note in analysis.notes:
            st.caption(f":material/info: {note}")
        figures = known_figures(list(analysis.lines))
        if figures:
            _results(analysis, figures)
        _runs(chosen, analysis, figures)


def _results(analysis: Analysis, figures: list[str]) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        figure = st.selectbox("Figure", figures, key="experiment_figure", width=240)
        numbers = list(range(1, len(analysis.groups) + 1))
        base = st.selectbox(
            "Baseline: group", numbers, key=f"experiment_baseline_{len(numbers)}", width=160
        )
        every = st.toggle("Every variable", key="experiment_every")
    baseline = int(base) - 1
    _conditions(analysis)
    _groups(analysis, baseline, figure, every=every)
    _findings(analysis, baseline, figure)
    _strip(analysis, figure)


def _conditions(analysis: Analysis) -> None:
    drift = experiment_rows.drift_sentence(analysis)
    if drift is not None:
        st.warning(drift, icon=":material/sync_problem:")
    throttled = experiment_rows.throttled_sentence(analysis)
    if throttled is not None:
        st.warning(throttled, icon=":material/thermostat:")


def _groups(analysis: Analysis, baseline: int, figure: str, *, every: bool) -> None:
    chosen = unit()
    rows = experiment_rows.group_rows(
        analysis, baseline, figure, lambda size: size_text(size, chosen), every=every
    )
    raw = experiment_rows.group_csv(analysis, baseline, figure)
    _card("Repeats of each spec", "experiment_groups", rows, raw)
    better = "less" if FIGURES[figure].lower_is_better else "more"
    st.caption(
        f"One line per spec; its runs are the repeats. Measured {figure}, {better} is better; variation is "
        "the standard deviation over the mean. Columns are the variables that differ, each with its kind."
    )


def _card(title: str, key: str, rows: list[dict[str, Any]], raw: list[dict[str, Any]]) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"**{title}**", width="stretch")
        st.download_button(
            "CSV",
            data=pd.DataFrame(raw).to_csv(index=False),
            file_name=f"peakmark-{key}.csv",
            mime="text/csv",
            icon=":material/download:",
            type="tertiary",
            on_click="ignore",
            key=f"{key}_csv",
        )
    st.dataframe(rows, hide_index=True, alt=title, height=_height(len(rows)))


def _height(rows: int) -> int | Literal["content"]:
    return "content" if rows <= MOST_ROWS_WHOLE else TABLE_HEIGHT_PX


def _findings(analysis: Analysis, baseline: int, figure: str) -> None:
    found = experiment_rows.findings(analysis, baseline, figure)
    if found.mixed:
        lines = [f"**Against group {baseline + 1}:**", "", *_lines(found.mixed, "- {} {}")]
        st.warning("\n".join(lines), icon=":material/call_split:")
    if not found.answers:
        return
    with st.expander("Is the difference real?", icon=":material/balance:", expanded=True):
        for line in _lines(found.answers, "**{}:** {}"):
            st.markdown(line)
        for line in _lines(found.cautions, ":material/warning: {}: {}"):
            st.caption(line)


def _lines(said: Mapping[str, Sequence[int]], form: str) -> list[str]:
    named = experiment_rows.groups_named
    return [form.format(named(numbers), text) for text, numbers in said.items()]


def _strip(analysis: Analysis, figure: str) -> None:
    divisor, axis = _axis(analysis, figure)
    here = {member.run_id for member in analysis.members if member.run_id}
    labels = experiment_rows.short_labels(analysis)
    points = [
        {
            "group": label,
            "value": line.figures[figure] / divisor,
            "text": f"{line.run.id} {line.part}: {_text(figure, line.figures[figure])}",
            "is_here": line.run.id in here,
            "is_throttled": clocks_of(line.run.environment).is_throttled,
        }
        for label, group in zip(labels, analysis.groups, strict=True)
        for line in group.lines
        if line.outcome == "done" and figure in line.figures
    ]
    if not points:
        return
    show_figure(
        repeats_figure(points, axis),
        key="experiment_repeats",
        title=f"{figure[0].upper()}{figure[1:]} of every run",
        caption="One mark per run: square measured here, dot recorded elsewhere, grey where the driver "
        "had lowered the clock. The bar is the range of a spec's repeats, the tick their median.",
        rows=points,
    )


def _axis(analysis: Analysis, figure: str) -> tuple[float, str]:
    values = [line.figures[figure] for line in analysis.lines if figure in line.figures]
    kind = FIGURES[figure].unit
    if kind == "bytes":
        divisor, name = axis_unit(max(values, default=0), unit())
        return divisor, f"{name} {figure}"
    if kind == "s":
        return (1, f"{figure}, s") if max(values, default=0) >= 1 else (1e-3, f"{figure}, ms")
    return 1, figure


def _text(figure: str, value: float) -> str:
    chosen = unit()
    return experiment_rows.figure_text(figure, value, lambda size: size_text(size, chosen))


def _runs(chosen: int, analysis: Analysis, figures: Sequence[str]) -> None:
    """Draw the runs with their environment; selected ones can be opened or taken out."""
    if not analysis.members:
        return
    figure = st.session_state.get("experiment_figure") or (figures[0] if figures else "step time")
    unit_name = unit()
    rows = experiment_rows.run_rows(analysis, figure, lambda size: size_text(size, unit_name))
    with st.container(border=True, key="experiment_runs_card"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown("**Runs**", width="stretch")
            st.download_button(
                "CSV",
                data=pd.DataFrame(experiment_rows.run_rows(analysis, figure, None)).to_csv(
                    index=False
                ),
                file_name="peakmark-experiment-runs.csv",
                mime="text/csv",
                icon=":material/download:",
                type="tertiary",
                on_click="ignore",
                key="experiment_runs_csv",
            )
        drawn = st.dataframe(
            rows,
            key="experiment_runs",
            hide_index=True,
            on_select="rerun",
            selection_mode="multi-row",
            height=_height(len(rows)),
            alt="Runs of the experiment",
        )
        selected = {rows[i]["run"] for i in drawn["selection"]["rows"] if i < len(rows)}
        _selected(chosen, analysis, selected)


def _selected(chosen: int, analysis: Analysis, selected: set[str]) -> None:
    members = [m for m in analysis.members if experiment_rows.member_name(m) in selected]
    gone = [m for m in analysis.members if m.spec is None]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            f"Take {len(members)} out",
            icon=":material/playlist_remove:",
            key="experiment_remove",
            disabled=not members,
            on_click=remove_runs,
            args=(chosen, [member.id for member in members]),
        )
        if gone:
            st.button(
                f"Take {len(gone)} withdrawn out",
                key="experiment_remove_gone",
                on_click=remove_runs,
                args=(chosen, [member.id for member in gone]),
            )
        if len(members) == 1:
            name, value = (
                ("run", members[0].run_id) if members[0].run_id else ("row", members[0].row_id)
            )
            st.page_link(
                "app_pages/run.py",
                label="Open it",
                icon=":material/timeline:",
                query_params={name: str(value)},
            )
        elif not members:
            st.caption("Select runs to open them or to take them out of the experiment.")
