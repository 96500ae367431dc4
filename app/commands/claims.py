"""`peakmark claims`: what is said in numbers of FlashAttention and ZeRO, computed and judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from app.commands.options import SIZE_OPTIONS, TARGET_OPTIONS, plan_from, with_options
from app.commands.output import (
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
    styled,
)
from app.commands.store import opened_database

VERDICT_STYLES = {"holds": "green", "holds only when": "yellow", "does not hold": "red"}
COLUMNS = (("claim", "says", "verdict", "claimed"), ("computed", "your plan", "measured"))
CASE_COLUMNS = (("", "case", "from"), ("value", "agrees"))


@with_options(TARGET_OPTIONS, SIZE_OPTIONS)
def claims_command(
    *,
    chosen: Mapping[str, Any],
    claim: Annotated[
        str | None, typer.Option(help="One claim by its id, case by case.", show_default="all")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Judge the numeric claims about FlashAttention and ZeRO, beside your plan and stored runs."""
    plan = plan_from(chosen)
    if claim is not None:
        check_claim(claim)
    found = [one for one in claim_documents(plan) if claim in (None, one["id"])]
    if json:
        print_json({"schema": 1, "claims": found})
    elif claim is not None:
        report_one(found[0])
    else:
        report(found)


def claim_documents(plan: Any) -> list[dict[str, Any]]:
    """Return every claim with its figures for `plan` and what the database's rows measured."""
    from db.measurements import measurements
    from db.types import Origin, RunKind
    from planner.claims.answers import answers

    with opened_database() as database:
        rows = measurements(database, kinds=[RunKind.ATTENTION, RunKind.TRAIN_STEP])
    here = [row.id for row in rows if row.origin is Origin.HERE]
    return [one.to_dict() for one in answers(plan, rows, here)]


def check_claim(claim: str) -> None:
    """Raise InputError for an id that no claim has, before any claim is computed."""
    from planner.claims.claim import all_claims

    ids = [one.id for one in all_claims()]
    if claim not in ids:
        allowed = f"one of {', '.join(ids)}"
        sentence = f"--claim is {claim[:60]!r}: it must be {allowed}."
        raise InputError("claim", claim, allowed, sentence)


def report(found: Sequence[Mapping[str, Any]]) -> None:
    """Print a line a claim, and the reason of every verdict."""
    from app.claim_words import verdict_sentence

    print_table(make_table("Claims about FlashAttention and ZeRO", *COLUMNS, list(rows(found))))
    for one in found:
        print_line(f"{one['id']}: {verdict_sentence(one)}")


def rows(found: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    """Yield the cells of each claim's line."""
    from app.claim_words import claimed_text, computed_text, range_text

    for one in found:
        mine = [figure for figure in one["computed"] if figure["own_plan"]]
        yield (
            one["id"],
            one["says"],
            styled(one["verdict"], VERDICT_STYLES[one["verdict"]]),
            claimed_text(one),
            computed_text(one),
            range_text(mine, one["unit"]) if mine else "-",
            range_text(one["measured"], one["unit"]),
        )


def report_one(claim: Mapping[str, Any]) -> None:
    """Print a claim: where it was made, what it needs, every case, and the verdict."""
    from app.claim_words import claimed_text, verdict_sentence

    said = claim["said_in"]
    print_line(f"{claim['says']} ({claimed_text(claim)})")
    print_line(f"Said in {said['file']}, {said['title']}: {claim['quote']}")
    print_line(f"Needs: {claim['needs']}")
    print_table(make_table(None, *CASE_COLUMNS, list(cases(claim))))
    if claim["left_out"]:
        print_line(f"Your plan has no figure here: {claim['left_out']}")
    style = VERDICT_STYLES[claim["verdict"]]
    print_line(styled(verdict_sentence(claim), style))


def cases(claim: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the cells of each figure of a claim, computed ones first."""
    from app.claim_words import NOT_MEASURED, seen_text, value_text

    for kind in ("computed", "measured"):
        for one in claim[kind]:
            value = value_text(one["value"], claim["unit"])
            source = one["how"] if kind == "computed" else seen_text(one)
            agrees = "yes" if one["agrees"] else "no"
            yield kind, one["condition"], source, value, agrees
    if not claim["measured"]:
        yield "measured", NOT_MEASURED, "", "-", "-"
