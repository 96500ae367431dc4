"""What the Claims page shows, as plain data: answers, tables, and the pages that figures open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import streamlit as st

from app import services, state
from app.claim_words import seen_text, value_text
from app.components.attention_form import link_of
from app.predictions import PlanKey, plan_key
from db.database import display_name, resolve_url
from db.measurements import measurements
from db.types import Origin, RunKind
from planner.attention.problem import Variant, parse_problem
from planner.claims.answers import answer
from planner.claims.claim import Claim
from planner.claims.evidence import Evidence
from planner.plan import Plan, parse_plan

STORED_TTL_S = 60
KINDS = (RunKind.ATTENTION, RunKind.TRAIN_STEP)
PLAN_PAGE, ATTENTION_PAGE = "app_pages/plan.py", "app_pages/attention.py"


def claim_row(plan: Plan, claim: Claim) -> dict[str, Any]:
    """Return one claim (see `planner.claims.claim.Answer`), with a figure for `plan` beside.

    All of them take seconds at first: a page draws one after the other.
    """
    return _claim_row(display_name(resolve_url(None)), plan_key(plan), claim.id, plan, claim)


@st.cache_data(max_entries=500, ttl=STORED_TTL_S, show_spinner=False)
def _claim_row(url: str, key: PlanKey, name: str, _plan: Plan, _claim: Claim) -> dict[str, Any]:
    return answer(_claim, _plan, _evidence(url)).to_dict()


@st.cache_resource(max_entries=2, ttl=STORED_TTL_S, show_spinner=False)
def _evidence(url: str) -> Evidence:
    rows = measurements(services.database(), kinds=list(KINDS))
    here = (row.id for row in rows if row.origin is Origin.HERE)
    return Evidence(rows=tuple(rows), here=frozenset(here))


def figure_rows(claim: Mapping[str, Any], sizes: str) -> list[dict[str, Any]]:
    """Return the lines behind a claim's figure: computed ones, then measured ones."""
    computed = [
        {
            "": "your plan" if one["own_plan"] else "computed",
            **_line(one, claim, sizes),
            "from": one["how"],
        }
        for one in claim["computed"]
    ]
    measured = [
        {"": "measured", **_line(one, claim, sizes), "from": seen_text(one)}
        for one in claim["measured"]
    ]
    return computed + measured


def _line(one: Mapping[str, Any], claim: Mapping[str, Any], sizes: str) -> dict[str, Any]:
    return {
        "case": one["condition"],
        "value": value_text(one["value"], claim["unit"], sizes),
        "agrees": one["agrees"],
    }


def table_rows(claims: Iterable[Mapping[str, Any]], sizes: str) -> list[dict[str, Any]]:
    """Return all figures of all claims as plain lines, as people read them and as numbers with a unit."""
    return [
        {
            "claim": claim["id"],
            "says": claim["says"],
            "said in": claim["said_in"]["english"],
            "verdict": claim["verdict"],
            "kind": kind,
            "case": one["condition"],
            "figure": value_text(one["value"], claim["unit"], sizes),
            "agrees": one["agrees"],
            "value": one["value"],
            "unit": claim["unit"],
            "rows": ", ".join(one.get("rows", ())),
        }
        for claim in claims
        for kind in ("computed", "measured")
        for one in claim[kind]
    ]


def page_of(opens: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the page that shows a figure's numbers, and the parameters of its address."""
    query = state.query_of_plan(opens["plan"])
    if opens["attention"] is None:
        return PLAN_PAGE, query
    variants = [Variant(name) for name in opens["variants"]]
    own = link_of(parse_plan(opens["plan"]), parse_problem(opens["attention"]), variants)
    return ATTENTION_PAGE, {**query, **own}
