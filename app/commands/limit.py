"""The largest that fits, proven by short runs: `peakmark prove --largest`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.commands.output import InputError, make_table, print_json, print_line, print_table
from app.commands.queued import exit_unless_done, say_outcome
from app.commands.store import opened_database

if TYPE_CHECKING:
    from planner.plan import Plan


def prove_largest(
    plan: Plan, largest: str, world: str | None, deadline_s: float, *, as_json: bool
) -> None:
    """Queue the search for a limit, wait for its end and print what it found.

    Raises InputError for a field that has no limit to look for, PlanError for what this machine lacks.
    """
    from app.commands.prove import Watch
    from app.limit_proof import limit_spec, limit_world
    from db.repository import create_run
    from planner.predict import predict
    from planner.reach import REACHES, largest_that_fits

    if largest not in REACHES:
        allowed = ", ".join(REACHES)
        sentence = f"--largest is {largest!r}: it must be one of {allowed}."
        raise InputError("largest", largest, allowed, sentence)
    place = limit_world(plan, world)
    spec = limit_spec(plan, largest_that_fits(plan, largest), place, deadline_s)
    with opened_database() as database:
        run_id = create_run(
            database,
            spec,
            plan.to_dict(),
            predict(plan).to_dict(),
            idempotency_key=uuid.uuid4().hex,
            who="command line",
        )
        detail = Watch(database=database, run_id=run_id, quiet=as_json).until_finished()
    if as_json:
        print_json({"schema": 1, **detail.to_dict()})
    else:
        say_outcome(detail)
        print_limit(detail.measured or {})
    exit_unless_done(detail)


def print_limit(measured: Mapping[str, Any]) -> None:
    """Print a limit and the runs that showed it; nothing for a run that did not begin."""
    from app.limit_rows import TRIAL_COLUMNS, trial_cells
    from planner.limit_run import limit_sentence
    from planner.units import format_bytes

    found = measured.get("limit")
    if not found:
        return
    cells = trial_cells(found, format_bytes)
    if cells:
        print_table(make_table("Short runs, in their order", (), TRIAL_COLUMNS, cells))
    print_line(limit_sentence(found))
