"""`peakmark compare`: up to four plans side by side, and what moved from the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.json_file import read_json_file
from app.commands.output import (
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
)

if TYPE_CHECKING:
    from planner.difference import ComparedPlan
    from planner.plan import Plan

Plans = Annotated[
    list[str],
    typer.Argument(
        metavar="PLAN...",
        help="Two to four plans: addresses of the Plan page, or files of a plan's JSON.",
        show_default=False,
    ),
]
Baseline = Annotated[
    int, typer.Option(help="Which plan the others are compared with, counted from 1.")
]
EveryRow = Annotated[bool, typer.Option("--all", help="Print what is equal in all plans, too.")]


def compare_command(
    plans: Plans, baseline: Baseline = 1, every: EveryRow = False, json: JsonFlag = False
) -> None:
    """Compare plans: options and predictions that differ, and which part of each total moved.

    A plan that cannot be planned is listed with its reason.
    """
    from planner.difference import differing, option_rows, quantity_rows

    compared = [plan for text in plans for plan in read_plans(text)]
    _check(len(compared), baseline)
    _check_two_are_planned(compared)
    options, quantities = option_rows(compared), quantity_rows(compared)
    shown = [rows if every else differing(rows) for rows in (options, quantities)]
    falls = waterfalls(compared, baseline - 1)
    if json:
        print_json(
            {
                "schema": 1,
                "baseline": baseline - 1,
                "plans": [{"plan": dict(one.document), "refusal": one.refusal} for one in compared],
                "options": [row.to_dict() for row in shown[0]],
                "quantities": [row.to_dict() for row in shown[1]],
                "waterfalls": falls,
            }
        )
        return
    _print(compared, shown, baseline - 1)


def _check(count: int, baseline: int) -> None:
    from planner.difference import MAX_PLANS

    if not 2 <= count <= MAX_PLANS:
        allowed = f"2 to {MAX_PLANS} plans"
        sentence = f"{count} plan{'' if count == 1 else 's'} cannot be compared: give {allowed}."
        raise InputError("plans", count, allowed, sentence)
    if not 1 <= baseline <= count:
        allowed = f"from 1 to {count}"
        sentence = f"--baseline is {baseline}: it must be {allowed}, one of the plans given."
        raise InputError("baseline", baseline, allowed, sentence)


def _check_two_are_planned(plans: list[ComparedPlan]) -> None:
    """Raise InputError where nothing is left to compare, with the first plan's reason."""
    planned = sum(plan.prediction is not None for plan in plans)
    reasons = [plan.refusal for plan in plans if plan.refusal is not None]
    if planned < 2 and reasons:
        allowed = "at least two plans that can be planned"
        sentence = f"{planned} of {len(plans)} plans can be planned, {allowed} are needed: "
        raise InputError("plans", planned, allowed, sentence + reasons[0])


def read_plans(text: str) -> list[ComparedPlan]:
    """Return the plans that an argument names: a file's, a link's, or all of a comparison's link.

    Raises InputError for a file that cannot be read, PlanError for a link that is none.
    """
    from app.plan_links import document_of, read_link, set_of, unpacked
    from planner.difference import ComparedPlan, compare_plan
    from planner.errors import PlanError

    if text.endswith(".json"):
        said, allowed = f"{text} cannot be read as a plan's JSON", "a file of a plan's JSON"
        return [compare_plan(read_json_file("plans", Path(text), said, allowed), _answer)]
    query = read_link(text)
    found = []
    for one in [unpacked(plan) for plan in set_of(query)] or [query]:
        if "run" in one or "row" in one:
            sentence = "The link is of a run: give the link of its plan, which its page opens."
            raise InputError("plans", text, "the link of a plan", sentence)
        try:
            found.append(compare_plan(document_of(one), _answer))
        except PlanError as error:
            found.append(ComparedPlan(document={}, refusal=str(error)))
    return found


def _answer(plan: Plan) -> dict[str, Any]:
    """Predict a plan as the page does: at the rates calibrated here, where there are any."""
    from app.own_calibration import timed_here
    from planner.predict import predict

    return predict(timed_here(plan)).to_dict()


def waterfalls(plans: list[ComparedPlan], baseline: int) -> list[dict[str, Any]]:
    """Return what moved from the baseline to every other plan, memory and step time."""
    from planner.difference import Measure, waterfall

    first = plans[baseline].prediction
    return [
        {"to": index, **waterfall(first, plan.prediction, measure).to_dict()}
        for index, plan in enumerate(plans)
        if first and plan.prediction and index != baseline
        for measure in Measure
    ]


def _print(plans: list[ComparedPlan], shown: list[Any], baseline: int) -> None:
    from app.compare_words import difference_table
    from app.plan_links import LETTERS
    from planner.difference import Measure, waterfall
    from planner.units import format_bytes, format_seconds

    for letter, plan in zip(LETTERS, plans, strict=False):
        if plan.refusal:
            print_line(f"{letter} is not planned: {plan.refusal}")
    for title, rows, changes in zip(
        ("What was chosen", "What is predicted"), shown, (False, True), strict=True
    ):
        table = difference_table(rows, baseline, format_bytes, changes=changes)
        if table:
            columns = list(table[0])
            cells = [list(line.values()) for line in table]
            print_table(make_table(title, columns[:2], columns[2:], cells))
    first = plans[baseline].prediction
    for index, plan in enumerate(plans):
        if first and plan.prediction and index != baseline:
            names = (LETTERS[baseline], LETTERS[index])
            memory = waterfall(first, plan.prediction, Measure.DEVICE)
            print_line(memory.sentence(format_bytes, names))
            time = waterfall(first, plan.prediction, Measure.STEP_TIME)
            print_line(time.sentence(format_seconds, names))
