"""`peakmark calibrate`: measure what this machine's GPUs and links really do."""

from __future__ import annotations

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
from app.commands.queued import exit_unless_done, run_here, say_outcome

if TYPE_CHECKING:
    from db.views import RunDetail

WORLDS = ("nccl", "cpu")
WORDS = ("operation", "type", "at shape")
FIGURES = ("best measured", "vendor sheet", "of it", "points")


def calibrate_command(
    *,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="GPUs, or processes on the CPU; all GPUs if left out."),
    ] = None,
    world: Annotated[
        str | None, typer.Option(help="nccl or cpu; nccl where there is a GPU if left out.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds after which nothing more is begun.")
    ] = 150.0,
    deadline: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds until the run is stopped.")
    ] = 600.0,
    json: JsonFlag = False,
) -> None:
    """Measure products, attention, memory, launches, copies and collectives of this machine.

    The curves are stored with their environment. Exit code 0 when the run is done, else 1.
    """
    spec = calibration_spec(gpus, world, budget, deadline)
    detail = run_here(spec, quiet=json)
    report(detail, as_json=json)
    exit_unless_done(detail)


def calibration_spec(
    gpus: int | None, world: str | None, budget_s: float, deadline_s: float
) -> dict[str, Any]:
    """Return the job spec; raises InputError for a world that this machine does not have."""
    from planner.attached import attached_gpus

    attached = len(attached_gpus().gpus)
    chosen = world or ("nccl" if attached else "cpu")
    if chosen not in WORLDS:
        allowed = " or ".join(WORLDS)
        sentence = f"--world is {world!r}: it must be {allowed}."
        raise InputError("world", world, allowed, sentence)
    if chosen == "nccl" and (gpus or 1) > attached:
        sentence = (
            f"--gpus {gpus or 1} in the world nccl needs as many GPUs and {attached} are attached: "
            "use fewer, or --world cpu."
        )
        raise InputError("gpus", gpus, f"at most {attached}", sentence)
    ranks = gpus or (attached if chosen == "nccl" else 1)
    return {
        "schema": 1,
        "kind": "calibrate",
        "world": chosen,
        "calibration": {"world_size": ranks, "budget_s": budget_s},
        "deadline_s": deadline_s,
    }


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and the best of each operation beside the vendor's sheet."""
    from planner.calibration import stored_findings

    if as_json:
        found = stored_findings(detail.measured or {}, detail.environment)
        print_json({"schema": 1, **detail.to_dict(), "findings": [one.to_dict() for one in found]})
        return
    say_outcome(detail)
    if detail.measured:
        print_calibration(detail)


def print_calibration(detail: RunDetail) -> None:
    """Print the best of each operation of a run, under the name of its device."""
    from planner.calibration import finding_cells, stored_findings

    measured, environment = detail.measured or {}, detail.environment or {}
    name = (environment.get("gpu") or {}).get("name") or "CPU"
    seconds = measured.get("duration_s") or 0.0
    title = f"{name}: {len(measured['curves'])} points in {seconds:.0f} s"
    rows = [finding_cells(one) for one in stored_findings(measured, environment)]
    print_table(make_table(title, WORDS, FIGURES, rows))
    if measured.get("left_out"):
        print_line(f"{len(measured['left_out'])} points were left out: the budget was over.")
