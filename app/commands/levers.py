"""`peakmark levers`: what single changes of a plan save and cost, what makes it fit, how far it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.commands.options import SIZE_OPTIONS, TARGET_OPTIONS, plan_from, with_options
from app.commands.output import (
    VERDICT_STYLES,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
    styled,
)

if TYPE_CHECKING:
    from planner.levers import Lever, Remedies

SHOWN = 8


@with_options(TARGET_OPTIONS, SIZE_OPTIONS)
def levers_command(*, chosen: Mapping[str, Any], json: JsonFlag = False) -> None:
    """Rank the single changes of a training plan by what they save, and say what would make it fit."""
    from planner.changes import Kind
    from planner.levers import levers_of, of_kind, remedies, saving, speeding
    from planner.predict import predict
    from planner.reach import REACHES, largest_that_fits
    from planner.verdict import State

    plan = plan_from(chosen)
    before = predict(plan)
    levers = levers_of(plan, before)
    fits = before.verdict.state is State.FITS
    found = None if fits else remedies(plan, levers, before)
    reaches = [largest_that_fits(plan, name) for name in REACHES]
    if json:
        print_json(
            {
                "schema": 1,
                "plan": plan.to_dict(),
                "verdict": before.verdict.to_dict(),
                "remedies": None if found is None else found.to_dict(),
                "levers": [lever.to_dict() for lever in levers],
                "reaches": [reach.to_dict() for reach in reaches],
            }
        )
        return
    print_line(styled(before.verdict.sentence, VERDICT_STYLES[before.verdict.state]))
    if found is not None:
        print_remedies(found)
    system = of_kind(levers, Kind.SYSTEM)
    print_levers("Saves memory", saving(system, plan.hardware.visible_bytes)[:SHOWN])
    print_levers("Saves time, and fits", speeding(system)[:SHOWN])
    algorithm = of_kind(levers, Kind.ALGORITHM)
    print_levers("Changes of the algorithm: another model or training", algorithm)
    for reach in reaches:
        print_line(reach.sentence())


def print_remedies(found: Remedies) -> None:
    """Print what would make the plan fit."""
    answers = found.system
    if answers:
        print_levers("What would make it fit, the smallest change first", answers)
    elif found.closest is not None:
        print_line(f"No three changes make it fit; closest is {found.closest.change.words}.")
    print_levers("What would make another model or training fit", found.algorithms)


def print_levers(title: str, levers: Sequence[Lever]) -> None:
    """Print a table of levers, nothing where there are none."""
    from planner.units import format_bytes

    rows = [
        (
            lever.change.words,
            lever.change.caution,
            lever.effect(),
            styled(format_bytes(lever.device_bytes), VERDICT_STYLES[lever.state]),
        )
        for lever in levers
    ]
    if rows:
        columns = ("memory and time", "then needs")
        print_table(make_table(title, ("change", "besides"), columns, rows))
