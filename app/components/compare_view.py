"""The Compare page: up to four plans side by side, what differs, and which part moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from app import compare_rows, compare_words, state
from app.charts.compare import waterfall_figure
from app.charts.style import axis_unit, size_text
from app.components import compare_tray
from app.components.current_plan import keep_plan_in_url
from app.components.figure import show_figure
from app.components.header import header_line, unit
from app.components.problems import told_in_one_sentence
from app.components.verdict import LOOKS
from app.plan_links import BASELINE_KEY, CHOSEN_KEY, LETTERS, set_query, unpacked
from planner.difference import (
    MAX_PLANS,
    ComparedPlan,
    DifferenceRow,
    Measure,
    differing,
    option_rows,
    quantity_rows,
    waterfall,
)
from planner.units import format_count, format_seconds

# Longer tables scroll.
MOST_ROWS_WHOLE, TABLE_HEIGHT_PX = 16, 620
EMPTY = (
    "No plan is here yet. Add the current one, change it on the Plan page and add it again; or paste "
    "the address of a plan, of a run or of another comparison. The set lives in this page's address."
)


def show_compare_page() -> None:
    """Draw the plans of the set, their differences and a waterfall."""
    with told_in_one_sentence():
        links = compare_tray.tray()
        _ways_to_add(len(links))
        if not links:
            keep_plan_in_url()
            st.info(EMPTY, icon=":material/compare_arrows:")
            st.button(
                "Show an example of this plan",
                icon=":material/compare_arrows:",
                key="compare_example",
                on_click=compare_tray.add_example,
                help="The plan with full checkpointing and with eager attention beside it.",
            )
            return
        if len(links) > MAX_PLANS:
            st.warning(f"The link holds {len(links)} plans: the first {MAX_PLANS} are shown.")
        plans = [compare_rows.planned(link) for link in links[:MAX_PLANS]]
        baseline, chosen = _choices(plans)
        own = set_query(links) | {BASELINE_KEY: LETTERS[baseline]}
        keep_plan_in_url(own | ({} if chosen is None else {CHOSEN_KEY: LETTERS[chosen]}))
        _cards(links[:MAX_PLANS], plans, baseline)
        if len(plans) > 1:
            _tables(plans, baseline)
        if chosen is not None:
            _waterfalls(plans, baseline, chosen)


def _ways_to_add(held: int) -> None:
    full = held >= MAX_PLANS
    with st.container(border=True, key="compare_add_card"):
        left, middle, right = st.columns([2, 4, 4], vertical_alignment="bottom")
        with left:
            st.button(
                "Add the current plan",
                icon=":material/add:",
                key="compare_add_here",
                on_click=compare_tray.add_current,
                disabled=full,
            )
        with middle:
            st.text_input(
                "Paste a link of a plan, a run or a comparison",
                key=compare_tray.PASTED,
                on_change=compare_tray.add_pasted,
                disabled=full,
                placeholder="http://…/?seq=8192&zero=1",
            )
        with right:
            runs = {run["id"]: run["words"] for run in compare_rows.runs_with_plans()}
            st.selectbox(
                "or take the plan of a run here",
                list(runs),
                index=None,
                format_func=lambda run: runs[run],
                key=compare_tray.RUN,
                on_change=compare_tray.add_chosen_run,
                disabled=full or not runs,
                placeholder="Choose a run" if runs else "No run here has a plan yet",
            )
        problem = st.session_state.get(compare_tray.PROBLEM)
        if problem:
            st.error(problem, icon=":material/link_off:")
        if full:
            st.caption(f"{MAX_PLANS} plans are compared at most: remove one to add another.")


def _choices(plans: Sequence[ComparedPlan]) -> tuple[int, int | None]:
    """Draw which plan is the baseline and which is explained; None where there is no second one."""
    letters = [LETTERS[i] for i, plan in enumerate(plans) if plan.prediction]
    if not letters:
        return 0, None
    with st.container(horizontal=True):
        base = _letter("Baseline", letters, BASELINE_KEY)
        others = [letter for letter in letters if letter != base]
        chosen = _letter("Explain the difference to", others, CHOSEN_KEY) if others else None
    return LETTERS.index(base), None if chosen is None else LETTERS.index(chosen)


def _letter(label: str, letters: list[str], key: str) -> str:
    """Ask for one plan; what the address says is chosen first."""
    wanted = st.query_params.get(key)
    default = wanted if wanted in letters else letters[0]
    return str(
        st.segmented_control(
            label,
            letters,
            default=default,
            required=True,
            # Another set of letters is another question, which begins at what the address says.
            key=f"compare_{key}_{''.join(letters)}",
        )
    )


def _cards(links: Sequence[str], plans: Sequence[ComparedPlan], baseline: int) -> None:
    columns = st.columns(len(plans))
    for index, (column, link, plan) in enumerate(zip(columns, links, plans, strict=True)):
        with column, st.container(border=True, key=f"compare_card_{index}"):
            _card(index, link, plan, is_baseline=index == baseline and plan.prediction is not None)


def _card(index: int, link: str, plan: ComparedPlan, *, is_baseline: bool) -> None:
    query, chosen = unpacked(link), unit()
    title = f"**{LETTERS[index]}**" + (" :gray-badge[baseline]" if is_baseline else "")
    prediction = plan.prediction
    if prediction is not None:
        label, colour, icon = LOOKS[prediction["verdict"]["state"]]
        title += f" :{colour}-badge[{icon} {label}]"
    st.markdown(title)
    st.markdown(header_line(state.values_from({}, query)))
    if prediction is None:
        st.error(str(plan.refusal), icon=":material/error:")
    else:
        speed = prediction["throughput"]
        needed = size_text(prediction["memory"]["device_bytes"], chosen)
        st.caption(
            f"{needed} per GPU · step {format_seconds(speed['step_time_s'])} · "
            f"{format_count(speed['tokens_per_s'])} tokens/s"
        )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.page_link(
            "app_pages/plan.py", label="Open", icon=":material/straighten:", query_params=query
        )
        st.button(
            "Remove",
            icon=":material/close:",
            type="tertiary",
            key=f"compare_remove_{index}",
            on_click=compare_tray.remove,
            args=(index,),
        )


def _tables(plans: Sequence[ComparedPlan], baseline: int) -> None:
    only = st.toggle("Differences only", value=True, key="compare_only")
    options, quantities = option_rows(plans), quantity_rows(plans)
    _table(
        "What was chosen",
        "compare_options",
        differing(options) if only else options,
        baseline,
        "Every option, and every dimension of the model, that is not the same in all plans; — where "
        "a plan has no such option.",
        changes=False,
    )
    _table(
        "What is predicted",
        "compare_quantities",
        differing(quantities) if only else quantities,
        baseline,
        "Memory is of the worst GPU at its peak: the parts from parameters to nccl add up to device "
        "bytes, those without segments, context and nccl to allocated. The parts of the time add up to the step.",
    )


def _table(
    title: str,
    key: str,
    rows: Sequence[DifferenceRow],
    baseline: int,
    caption: str,
    *,
    changes: bool = True,
) -> None:
    chosen = unit()
    with st.container(border=True, key=f"{key}_card"):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{title}**", width="stretch")
            st.download_button(
                "CSV",
                data=pd.DataFrame(compare_words.raw_rows(rows, baseline)).to_csv(index=False),
                file_name=f"peakmark-{key}.csv",
                mime="text/csv",
                icon=":material/download:",
                type="tertiary",
                on_click="ignore",
                key=f"{key}_csv",
            )
        if rows:
            table = compare_words.difference_table(
                rows, baseline, lambda size: size_text(size, chosen), changes=changes
            )
            st.dataframe(
                table,
                hide_index=True,
                alt=title,
                height="content" if len(table) <= MOST_ROWS_WHOLE else TABLE_HEIGHT_PX,
            )
            st.caption(caption)
        else:
            st.caption("Nothing differs.")


def _waterfalls(plans: Sequence[ComparedPlan], baseline: int, chosen: int) -> None:
    first, second = plans[baseline].prediction, plans[chosen].prediction
    assert first is not None and second is not None
    names = (LETTERS[baseline], LETTERS[chosen])
    jobs = [prediction["plan"]["job"] for prediction in (first, second)]
    if jobs[0] != jobs[1]:
        st.info(
            f"{names[0]} is a plan to {jobs[0]} and {names[1]} one to {jobs[1]}: a training step and a "
            "decode step are different work, so their times are not set against each other.",
            icon=":material/info:",
        )
        _memory_fall(first, second, names)
        return
    left, right = st.columns(2)
    with left:
        _memory_fall(first, second, names)
    with right:
        _time_fall(first, second, names)


def _memory_fall(first: Any, second: Any, names: tuple[str, str]) -> None:
    chosen = unit()
    fall = waterfall(first, second, Measure.DEVICE)
    divisor, unit_name = axis_unit(max(fall.start, fall.end), chosen)

    def show(size: float) -> str:
        return size_text(size, chosen)

    peaks = [prediction["memory"]["peak_phase"].replace("_", " ") for prediction in (first, second)]
    where = f"Both peak in {peaks[0]}" if peaks[0] == peaks[1] else _peaks(names, peaks)
    show_figure(
        waterfall_figure(fall, names, divisor, f"{unit_name} of device memory", show),
        key="compare_memory",
        title=f"Memory: from {names[0]} to {names[1]}",
        caption=f"{fall.sentence(show, names)} {where}. Predicted device bytes at the peak of the "
        "worst GPU; red adds, green saves.",
        rows=fall.to_dict()["moves"],
    )


def _peaks(names: tuple[str, str], peaks: list[str]) -> str:
    return f"{names[0]} peaks in {peaks[0]}, {names[1]} in {peaks[1]}"


def _time_fall(first: Any, second: Any, names: tuple[str, str]) -> None:
    fall = waterfall(first, second, Measure.STEP_TIME)
    show: Callable[[float], str] = format_seconds
    show_figure(
        waterfall_figure(fall, names, 1e-3, "ms per step", show),
        key="compare_time",
        title=f"Step time: from {names[0]} to {names[1]}",
        caption=f"{fall.sentence(show, names)} Predicted time of one step by what it goes to; red "
        "adds, green saves.",
        rows=fall.to_dict()["moves"],
    )
