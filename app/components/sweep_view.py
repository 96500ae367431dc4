"""The Sweep page: of everything that is left open, what should I run?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pandas as pd
import streamlit as st

from app import services, state
from app.charts.style import size_text
from app.charts.sweep import sweep_figure
from app.components.current_plan import current_document, keep_plan_in_url
from app.components.figure import metric_row, show_figure, show_table
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from app.components.sweep_form import sweep_form
from app.predictions import plan_key, rates_words
from app.sweep_job import Answer, SweepJob, front_of, others_of, priced
from app.sweep_link import SweepLink
from planner.choice import Aim, Best, choice_words
from planner.plan import Plan
from planner.sweep_axes import Axes, Limits, axes_of
from planner.units import format_count

JOB_KEY = "sweep_job"
# What is there within this time is drawn at once; after it the page says how far it is.
WAIT_S = 2.0
REDRAW_S = 0.5
AIM_LABELS: Mapping[str, str] = {
    Aim.FASTEST: "Most tokens per second",
    Aim.CHEAPEST: "Least cost per token",
}


def show_sweep_page() -> None:
    """Draw the form, and the answer or how far it is."""
    with told_in_one_sentence():
        document = current_document()
        if document is None:
            st.info("Give a model on the Plan page to sweep around it.", icon=":material/info:")
            st.page_link("app_pages/plan.py", label="To the plan", icon=":material/straighten:")
            return
        plan = services.check_plan(document)
        link = SweepLink(plan, st.query_params.to_dict())
        try:
            # Refuses a plan that serves before it is asked what to vary.
            axes_of(plan, {}, Limits())
            given, limits, price = sweep_form(plan, link)
            aim = _aim(link)
        finally:
            keep_plan_in_url(link.own)
        axes = axes_of(plan, given, limits)
        job = _job(plan, axes, limits)
        answer = job.answer(WAIT_S)
        if answer is None:
            if job.is_cancelled:
                _cancelled(job)
            else:
                _progress()
            return
        _answer(answer, price, aim)


def _aim(link: SweepLink) -> Aim:
    """Draw the choice of what is best."""
    chosen = st.segmented_control(
        "Best is",
        list(AIM_LABELS),
        default=Aim(link.choice("best", list(AIM_LABELS), Aim.FASTEST)),
        required=True,
        format_func=lambda value: AIM_LABELS[value],
        key="sweep_aim",
    )
    link.keep("best", str(chosen), str(Aim.FASTEST))
    return Aim(chosen)


def _job(plan: Plan, axes: Axes, limits: Limits) -> SweepJob:
    """Return this session's sweep of these choices, started if it is not that one."""
    key = (plan_key(plan), axes, limits)
    known = st.session_state.get(JOB_KEY)
    if known is not None and known[0] == key:
        return cast("SweepJob", known[1])
    if known is not None:
        known[1].cancel()
    job = SweepJob(plan, axes, limits)
    st.session_state[JOB_KEY] = (key, job)
    return job


@st.fragment(run_every=REDRAW_S)
def _progress() -> None:
    """Say how far the sweep is; draw the page anew when it has ended."""
    with told_in_one_sentence():
        _, job = st.session_state[JOB_KEY]
        if job.answer(0.0) is not None or job.is_cancelled:
            st.rerun()
        st.progress(job.done / job.total, f"Predicted {job.done:,} of {job.total:,} combinations.")
        st.button("Cancel", icon=":material/cancel:", key="sweep_cancel", on_click=job.cancel)


def _cancelled(job: SweepJob) -> None:
    st.info(
        f"Cancelled after {job.done:,} of {job.total:,} combinations. Leave less open, or sweep again.",
        icon=":material/cancel:",
    )
    st.button("Sweep again", on_click=lambda: st.session_state.pop(JOB_KEY, None))


def _answer(answer: Answer, price: float | None, aim: Aim) -> None:
    swept, chosen = answer.swept, unit()
    counts = swept.counts()
    with st.container(border=True, key="sweep_best"):
        best = answer.best[aim]
        _best(best, chosen)
        _metrics(counts, answer)
    if answer.front:
        front, others = front_of(answer, price), others_of(answer, price)
        picked = _figure(answer, front, others, best, price)
        picked = _front_table(front, price) or picked
        _picked(answer, picked, price)
    _left_out(answer)
    _take_away(answer, price)


def _best(best: Best | None, chosen: str) -> None:
    if best is None:
        st.markdown(
            "**None of these combinations fits.** Leave more open: checkpointing, smaller "
            "micro-batches, more GPUs, a split of the model, or a smaller margin."
        )
        return
    st.markdown(f"{best.sentence(lambda size: size_text(size, chosen))}")
    if best.refuted:
        st.caption(
            f"{best.refuted} that the formulas put ahead did not fit when their allocator was replayed."
        )
    st.page_link(
        "app_pages/plan.py",
        label="Open it as the plan",
        icon=":material/straighten:",
        query_params=state.query_of_plan(best.plan.to_dict()),
    )


def _metrics(counts: Mapping[str, int], answer: Answer) -> None:
    with metric_row():
        st.metric("Combinations", f"{sum(counts.values()):,}")
        st.metric("Could be planned", f"{answer.swept.planned:,}")
        st.metric("Fit with the margin", f"{counts['admissible']:,}")
        st.metric("On the front", f"{len(answer.front):,}", help="None is better in everything.")


def _figure(
    answer: Answer,
    front: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    best: Best | None,
    price: float | None,
) -> int | None:
    """Draw the figure; return the row that was clicked."""
    capacity = answer.swept.plan.hardware.visible_bytes
    hidden = answer.swept.counts()["admissible"] - len(front) - len(others)
    sampled = f" {hidden:,} more that are not on the front are not drawn." if hidden else ""
    row = None if best is None else priced(dict(best.row), price)
    clicked = show_figure(
        sweep_figure(front, others, row, capacity, unit()),
        key="sweep_front",
        title="Speed and memory of everything that fits",
        caption="Predicted (hollow): tokens per second of all GPUs over device bytes per GPU. Lines "
        "join the Pareto front of each number of GPUs: nothing is faster with as little memory on as "
        "few GPUs, and so nothing costs less per token. Segments are the plan's own share; the "
        f"star's were replayed.{sampled} {rates_words(answer.swept.plan)} Click a point to choose it.",
        rows=front,
        selectable=True,
    )
    rows = [point[0] if isinstance(point, list) else point for point in clicked]
    return int(rows[0]) if rows else None


def _front_table(front: Sequence[Mapping[str, Any]], price: float | None) -> int | None:
    """Draw the front as a table; return the row that was chosen."""
    st.markdown("### The front, fastest first")
    st.caption("Choose a row to open it as the plan.")
    chosen = unit()
    frame = pd.DataFrame([_shown(row, chosen) for row in front])
    drawn = st.dataframe(
        frame,
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            **dict.fromkeys(
                ("tokens/s", "per GPU"), st.column_config.NumberColumn(format="localized")
            ),
            "MFU %": st.column_config.NumberColumn(format="%.1f"),
        },
        key="sweep_table",
        alt="Plans of the Pareto front, fastest first",
    )
    rows = cast("Mapping[str, Any]", drawn)["selection"]["rows"]
    return int(front[rows[0]]["row"]) if rows else None


def _shown(row: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    cost = row.get("cost_per_million_tokens")
    return {
        "GPUs": row["gpus"],
        "tokens/s": _four_digits(row["tokens_per_s"]),
        "per GPU": _four_digits(row["tokens_per_s_per_gpu"]),
        "memory per GPU": size_text(row["device_bytes"], chosen),
        "MFU %": round(100 * row["mfu"], 1),
        **({} if cost is None else {"per million tokens": round(cost, 4)}),
        # Last, for it is wider than a phone.
        "plan": choice_words(row),
    }


def _four_digits(rate: float) -> float:
    """Return a rate as near as it is told elsewhere, but a number, so that a column can be sorted."""
    return float(f"{rate:.4g}")


def _picked(answer: Answer, row: int | None, price: float | None) -> None:
    if row is None:
        return
    record = priced(answer.swept.record(row), price)
    with st.container(border=True, key="sweep_picked"):
        speed = format_count(record["tokens_per_s"])
        size = size_text(record["device_bytes"], unit())
        st.markdown(f"**Chosen:** {choice_words(record)}: {speed} tokens/s, {size} per GPU.")
        st.page_link(
            "app_pages/plan.py",
            label="Open this as the plan",
            icon=":material/straighten:",
            query_params=state.query_of_plan(answer.swept.plan_at(row).to_dict()),
        )


def _left_out(answer: Answer) -> None:
    """Say of every combination that is not drawn why."""
    counts = answer.swept.counts()
    named = {
        "does_not_fit": "Does not fit.",
        "tight": "Tight: the interval of earlier errors reaches the capacity.",
        "too_little_margin": "Fits, but leaves less memory free than asked for.",
    }
    rows: list[dict[str, Any]] = [
        {"combinations": counts[name], "why": why} for name, why in named.items() if counts[name]
    ]
    rows += [
        {"combinations": count, "why": reason}
        for reason, count in sorted(answer.swept.not_planned.items(), key=lambda pair: -pair[1])
    ]
    if rows:
        total = sum(row["combinations"] for row in rows)
        with st.expander(f"{total:,} combinations that are not an answer, and why"):
            show_table(rows, key="sweep_left_out", title="Combinations left out, by reason")


def _take_away(answer: Answer, price: float | None) -> None:
    st.download_button(
        "Every planned combination as CSV",
        data=lambda: pd.DataFrame([priced(row, price) for row in answer.swept.records()]).to_csv(
            index=False
        ),
        file_name="peakmark-sweep.csv",
        mime="text/csv",
        icon=":material/download:",
        on_click="ignore",
        key="sweep_csv",
    )
