"""The Claims page: what is said in numbers of FlashAttention and ZeRO, computed, measured, judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app import claim_rows, services
from app.charts.claims import claim_figure
from app.claim_words import (
    claimed_text,
    computed_text,
    range_text,
    value_text,
    verdict_sentence,
)
from app.components.current_plan import current_document, keep_plan_in_url
from app.components.figure import metric_row, show_figure, show_table
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from planner.claims.claim import Topic, Verdict, all_claims
from planner.plan import Plan

WHAT_IT_IS = (
    "Two texts that are widely copied say what FlashAttention and ZeRO bring, in numbers. Here each "
    "number stands beside what the planner computes for cases that the claim may mean, beside what "
    "runs on a GPU measured, and beside your plan."
)
LOOKS: Mapping[str, tuple[str, str]] = {
    Verdict.HOLDS.value: ("green", ":material/check_circle:"),
    Verdict.ONLY_WHEN.value: ("orange", ":material/rule:"),
    Verdict.NOT.value: ("red", ":material/cancel:"),
}
TOPICS: Mapping[str, str] = {
    Topic.ATTENTION.value: "One attention call",
    Topic.TRAINING.value: "A training step",
    Topic.EXAMPLES.value: "The texts' examples",
    Topic.ZERO.value: "ZeRO",
}
PILLS: Mapping[str, str] = {
    Topic.ATTENTION.value: "Attention",
    Topic.TRAINING.value: "Training",
    Topic.EXAMPLES.value: "Examples",
    Topic.ZERO.value: "ZeRO",
}
Claim = Mapping[str, Any]


def show_claims_page() -> None:
    """Draw every claim with its verdict, for the plan that the form describes."""
    with told_in_one_sentence():
        document = current_document()
        if document is None:
            st.info(
                "Give a model on the Plan page to see the claims for it.", icon=":material/info:"
            )
            st.page_link("app_pages/plan.py", label="To the plan", icon=":material/straighten:")
            return
        plan = services.check_plan(document)
        keep_plan_in_url()
        st.caption(WHAT_IT_IS)
        counts = st.container()
        verdicts, topics = _chosen()
        claims = [
            claim
            for topic, heading in TOPICS.items()
            for claim in _topic(plan, topic, heading if topic in topics else None, verdicts)
        ]
        with counts:
            _counts(claims)
        st.markdown("### All figures")
        show_table(
            claim_rows.table_rows(claims, unit()), key="claims", title="All figures of all claims"
        )


def _topic(
    plan: Plan, topic: str, heading: str | None, verdicts: Sequence[str]
) -> list[dict[str, Any]]:
    """Draw the claims of a topic as they are computed, those without a heading not; return all of them."""
    found = []
    place = st.container()
    for claim in all_claims():
        if claim.topic != topic:
            continue
        row = claim_rows.claim_row(plan, claim)
        found.append(row)
        if heading is not None and row["verdict"] in verdicts:
            with place:
                if not any(one["verdict"] in verdicts for one in found[:-1]):
                    st.markdown(f"### {heading}")
                _claim(row)
    return found


def _counts(claims: Sequence[Claim]) -> None:
    found = Counter(claim["verdict"] for claim in claims)
    with metric_row():
        st.metric("Claims", len(claims))
        for verdict in Verdict:
            st.metric(verdict.value.capitalize(), found[verdict.value])


def _chosen() -> tuple[Sequence[str], Sequence[str]]:
    """Draw the choice of verdicts and topics; return what is chosen, all where nothing is."""
    left, right = st.columns(2)
    with left:
        verdicts = st.pills(
            "Verdict",
            list(LOOKS),
            selection_mode="multi",
            key="claims_verdicts",
            help="None chosen: all.",
        )
    with right:
        topics = st.pills(
            "About",
            list(TOPICS),
            selection_mode="multi",
            format_func=lambda topic: PILLS[topic],
            key="claims_topics",
            help="None chosen: all.",
        )
    return verdicts or list(LOOKS), topics or list(TOPICS)


def _claim(claim: Claim) -> None:
    colour, icon = LOOKS[claim["verdict"]]
    sizes = unit()
    with st.container(border=True, key=f"claim_{claim['id']}"):
        st.markdown(f"**{claim['says']}**")
        verdict = claim["verdict"].capitalize()
        sentence = verdict_sentence(claim).removeprefix(verdict)
        st.markdown(f":{colour}[{icon} **{verdict}**]{sentence}")
        st.caption(
            f"Claimed: {claimed_text(claim, sizes)} · computed: {computed_text(claim, sizes)} · "
            f"measured: {range_text(claim['measured'], claim['unit'], sizes)}{_own(claim, sizes)}"
        )
        more = st.expander(
            "Figures, conditions, source",
            icon=":material/query_stats:",
            key=f"claim_{claim['id']}_more",
            on_change="rerun",
        )
        if more.open:
            with more:
                _more(claim, sizes)


def _own(claim: Claim, sizes: str) -> str:
    mine = [one for one in claim["computed"] if one["own_plan"]]
    return f" · your plan: {range_text(mine, claim['unit'], sizes)}" if mine else ""


def said_line(claim: Claim) -> str:
    """Return what was said and where, as Markdown that shows a quote's asterisks: they are products."""
    said = claim["said_in"]
    quote = re.sub(r"([\\`*_~$\[\]])", r"\\\1", claim["quote"])
    return f"Said: “{quote}” — {said['title']} ({said['english']}, `{said['file']}`)"


def _more(claim: Claim, sizes: str) -> None:
    st.markdown(said_line(claim))
    st.markdown(f"Needs: {claim['needs']}")
    if claim["left_out"]:
        st.caption(f":material/info: Your plan has no figure here: {claim['left_out']}")
    measured = "" if claim["measured"] else " Nothing stored measured this yet."
    show_figure(
        claim_figure(claim, lambda value: value_text(value, claim["unit"], sizes)),
        key=f"claim_{claim['id']}_figure",
        title="Computed and measured",
        caption="Hollow: computed by the planner, the diamond for your plan; filled square: measured "
        "here, dot: recorded elsewhere. The green band agrees with the claim. Bytes are allocated "
        f"bytes, or device bytes where a GPU's capacity is asked for.{measured}",
        rows=claim_rows.figure_rows(claim, sizes),
    )
    for one in claim["computed"]:
        _case(one)


def _case(one: Mapping[str, Any]) -> None:
    """Draw a case: what its number was made of, and the page that shows it in full."""
    text = f"{one['condition']} — {one['how']}"
    if one["opens"] is None or one["own_plan"]:
        st.caption(text)
        return
    page, query = claim_rows.page_of(one["opens"])
    with st.container(horizontal=True, vertical_alignment="center"):
        st.page_link(
            page,
            label="Plan" if page == claim_rows.PLAN_PAGE else "Attention",
            icon=":material/open_in_new:",
            query_params=query,
            width="content",
        )
        st.caption(text, width="stretch")
