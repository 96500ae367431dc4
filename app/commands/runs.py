"""`peakmark runs`: the runs of the database; show, cancel or export them."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.output import (
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
)
from app.commands.store import opened_database
from app.saved_words import saved_lines

if TYPE_CHECKING:
    from db.engine import Database
    from db.views import RunDetail, RunSummary

WORDS = ("id", "kind", "model", "hardware", "world", "state")
FIGURES = ("counter", "predicted", "measured", "error")
app = typer.Typer(help="List runs, newest first; show, cancel or export them.")
RunId = Annotated[str, typer.Argument(help="The id that `peakmark runs` shows.")]


@app.callback(invoke_without_command=True)
def runs_command(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Newest runs to list.")] = 50,
    json: JsonFlag = False,
) -> None:
    """List runs, newest first; show, cancel or export them."""
    if context.invoked_subcommand is not None:
        return
    from db.repository import list_runs

    with opened_database() as database:
        found = list_runs(database, limit=limit)
        rows = [] if json else [run_row(database, run) for run in found]
    if json:
        print_json({"schema": 1, "runs": [run.to_dict() for run in found]})
        return
    if not found:
        print_line("No runs yet: `peakmark prove` and `peakmark calibrate` make them.")
        return
    print_table(make_table(None, WORDS, FIGURES, rows))


def run_row(database: Database, run: RunSummary) -> tuple[str, ...]:
    """Return one line of the table; the figures are bytes of the counter that the run's world measures."""
    from app.run_words import run_words
    from planner.units import format_bytes, format_signed

    words = run_words(require_run(database, run.id))
    ours, seen = words["predicted_bytes"], words["measured_bytes"]
    return (
        run.id,
        run.kind.value,
        words["model"] or "-",
        words["hardware"] or "-",
        run.world.value,
        "cancelling" if run.cancelling else run.state.value,
        words["counter"] or "-",
        "-" if ours is None else format_bytes(ours),
        "-" if seen is None else format_bytes(seen),
        format_signed(100 * (ours - seen) / seen if ours is not None and seen else None),
    )


def require_run(database: Database, run_id: str) -> RunDetail:
    """Return a run; raises InputError when there is none of this id."""
    from db.repository import get_run

    found = get_run(database, run_id)
    if found is None:
        sentence = f"There is no run {run_id[:60]!r}: `peakmark runs` lists them."
        raise InputError("id", run_id, "the id of a run", sentence)
    return found


def run_document(database: Database, run_id: str) -> dict[str, Any]:
    """Return everything known of a run as JSON, with its history."""
    from dataclasses import asdict

    from db.repository import run_events

    detail = require_run(database, run_id).to_dict()
    return {"schema": 1, **detail, "events": [asdict(e) for e in run_events(database, run_id)]}


@app.command("show")
def show_command(run_id: RunId, json: JsonFlag = False) -> None:
    """Show one run: what was asked, what happened, predicted and measured."""
    from app.commands.attention import print_attention
    from app.commands.calibrate import print_calibration
    from app.commands.comparison import print_comparison
    from app.commands.decode import print_decode
    from app.commands.limit import print_limit
    from app.commands.profile import print_profile
    from app.commands.quality import print_quality
    from app.commands.serve import print_serving

    with opened_database() as database:
        detail = require_run(database, run_id)
        document = run_document(database, run_id)
    if json:
        print_json(document)
        return
    summary = detail.summary
    print_line(f"{summary.id}: {summary.state.value} in world {summary.world.value}")
    if summary.model_name:
        print_line(f"{summary.model_name} planned for {summary.hardware_name or '-'}")
    else:
        print_line(summary.kind.value)
    if summary.why:
        print_line(summary.why)
    if (detail.measured or {}).get("curves"):
        print_calibration(detail)
    elif summary.kind.value == "attention":
        print_attention(detail)
    elif summary.kind.value == "decode":
        print_decode(detail.spec, detail.measured or {}, detail.environment)
    elif summary.kind.value == "serve":
        print_serving(detail)
    elif summary.kind.value == "profile":
        print_profile(detail.measured or {})
    elif summary.kind.value == "quality":
        print_quality(detail.measured or {})
    elif summary.kind.value == "limit":
        print_limit(detail.measured or {})
    elif detail.prediction and detail.measured:
        print_comparison(detail.prediction, detail.measured, summary.world.value)
    for line in saved_lines(detail.measured or {}):
        print_line(line)


@app.command("cancel")
def cancel_command(run_id: RunId, json: JsonFlag = False) -> None:
    """Cancel a queued run, or ask a running one to stop."""
    from db.repository import request_cancel

    with opened_database() as database:
        require_run(database, run_id)
        asked = request_cancel(database, run_id, who="command line")
        state = require_run(database, run_id).summary.state.value
    if json:
        print_json({"schema": 1, "id": run_id, "cancelled": asked, "state": state})
    else:
        print_line(f"{run_id}: {state}" if asked else f"{run_id} has ended already: {state}")


@app.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    json: JsonFlag = False,
) -> None:
    """Write every measurement made here as rows of the recorded/ format."""
    from app.commands.store import stored_rows

    with opened_database() as database:
        rows = stored_rows(database, made_here=True)
    rows = [row for row in rows if row.outcome in ("done", "oom_device")]
    try:
        with file.open("w", encoding="utf-8") as target:
            target.writelines(json_module.dumps(row.to_dict()) + "\n" for row in rows)
    except OSError as error:
        sentence = f"{file} cannot be written: {error.strerror}."
        raise InputError("file", str(file), "a file that can be written", sentence) from None
    if json:
        print_json({"schema": 1, "file": str(file), "rows": len(rows)})
    else:
        print_line(f"{len(rows)} rows written to {file}")
