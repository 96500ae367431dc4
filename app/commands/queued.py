"""What the commands share that queue one run here and wait for its end."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.output import InputError, print_line
from app.commands.store import opened_database

if TYPE_CHECKING:
    from db.views import RunDetail

DECODING_WORLDS = ("solo", "cpu")
ConfigOption = Annotated[
    Path | None, typer.Option(help="A Hugging Face config.json, instead of --model.")
]
DtypeOption = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; fp32 on a CPU.")]
DecodingWorldOption = Annotated[
    str | None, typer.Option(help="solo (a GPU) or cpu; solo where there is a GPU.")
]
DeadlineOption = Annotated[
    float, typer.Option(min=1, max=86_400, help="Seconds until the run is stopped.")
]


def run_here(spec: Mapping[str, Any], *, quiet: bool) -> RunDetail:
    """Queue a job spec without a prediction, wait for the run's end and return it."""
    from app.commands.prove import Watch
    from db.repository import create_run

    with opened_database() as database:
        key = uuid.uuid4().hex
        run_id = create_run(database, spec, None, None, idempotency_key=key, who="command line")
        return Watch(database=database, run_id=run_id, quiet=quiet).until_finished()


def say_outcome(detail: RunDetail) -> None:
    """Print how a run ended, and why."""
    summary = detail.summary
    print_line(f"Run {summary.id}: {summary.state.value} in world {summary.world.value}")
    if summary.why:
        print_line(summary.why)


def exit_unless_done(detail: RunDetail) -> None:
    """Leave with code 1 where a run is not done."""
    if detail.summary.state.value != "done":
        raise typer.Exit(1)


def decoding_model(model: str | None, config: Path | None) -> dict[str, Any]:
    """Return a job's model, llama-3.2-1b if none is named; raises InputError for two."""
    from app.commands.options import model_part

    if model is not None and config is not None:
        sentence = "--model and --config both name a model: give one of them."
        raise InputError("config", str(config), "without --model", sentence)
    return model_part({"model": model or "llama-3.2-1b", "config": config})


def decoding_world(world: str | None) -> str:
    """Return the world; raises InputError for one that this machine does not have."""
    from planner.attached import attached_gpus

    attached = len(attached_gpus().gpus)
    chosen = world or ("solo" if attached else "cpu")
    if chosen not in DECODING_WORLDS:
        allowed = " or ".join(DECODING_WORLDS)
        raise InputError("world", world, allowed, f"--world is {world!r}: it must be {allowed}.")
    if chosen == "solo" and not attached:
        sentence = "--world solo needs a GPU and none is attached: use --world cpu."
        raise InputError("world", world, "cpu", sentence)
    return chosen
