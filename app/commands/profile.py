"""`peakmark profile`: where the time of a real step or request goes, and what could be gained."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.folders import existing_folder
from app.commands.options import SIZE_OPTIONS, TARGET_OPTIONS, plan_from, with_options
from app.commands.output import (
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
)
from app.commands.prove import Watch, require_world
from app.commands.queued import DeadlineOption, exit_unless_done, say_outcome
from app.commands.store import opened_database

if TYPE_CHECKING:
    from db.views import RunDetail
    from planner.plan import Plan


@with_options(TARGET_OPTIONS, SIZE_OPTIONS)
def profile_command(
    *,
    chosen: Mapping[str, Any],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer, whose time counts as data.")
    ] = None,
    world: Annotated[
        str | None, typer.Option(help="nccl, solo or cpu; the best there is if left out.")
    ] = None,
    deadline: DeadlineOption = 1800.0,
    json: JsonFlag = False,
) -> None:
    """Run a training step under the profiler and split its time; for requests see decode --profile.

    Says for each part the most that its removal brings end to end. Exit code 0 when the run is done.
    """
    from db.repository import create_run

    plan = plan_from(chosen)
    spec, prediction = training_spec(plan, world)
    spec |= {"tokenizer": existing_folder("tokenizer", tokenizer), "deadline_s": deadline}
    with opened_database() as database:
        run_id = create_run(
            database,
            spec,
            plan.to_dict(),
            prediction,
            idempotency_key=uuid.uuid4().hex,
            who="command line",
        )
        detail = Watch(database=database, run_id=run_id, quiet=json).until_finished()
    report(detail, as_json=json)
    exit_unless_done(detail)


def training_spec(plan: Plan, world: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the spec of a training step's profile, and the plan's prediction.

    Raises InputError where this machine cannot run it, PlanError where no run can.
    """
    from planner.predict import predict

    if world == "shared":
        allowed = "nccl, solo or cpu"
        sentence = f"--world is 'shared', which is not honest for time: it must be {allowed}."
        raise InputError("world", world, allowed, sentence)
    prediction = predict(plan).to_dict()
    place = require_world(plan, prediction, world)
    spec = {"schema": 1, "kind": "profile", "world": place, "plan": plan.to_dict()}
    return spec, prediction


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and where its time goes."""
    if as_json:
        print_json({"schema": 1, **detail.to_dict()})
        return
    say_outcome(detail)
    print_profile(detail.measured or {})


def print_profile(measured: Mapping[str, Any]) -> None:
    """Print a profile's parts; nothing for a run that measured none."""
    from planner.time_shares import (
        PROFILE_COLUMNS,
        method_notes,
        profile_cells,
        profile_headline,
        verdict_sentence,
    )

    if "base_s" not in measured:
        return
    print_line(verdict_sentence(measured))
    cells = profile_cells(measured)
    title = profile_headline(measured)
    print_table(make_table(title, PROFILE_COLUMNS[:1], PROFILE_COLUMNS[1:], cells))
    for note in method_notes(measured):
        print_line(note)
