"""`peakmark serve --simulate`: what a trace would see on a GPU that need not be here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.commands.output import make_table, print_json, print_line, print_table

if TYPE_CHECKING:
    from planner.simulation.runs import SimulatedRun


def simulate_command(asked: Mapping[str, Any], gpu: str, *, as_json: bool) -> None:
    """Simulate a spec's `serve` on a GPU, and print it with static batching beside it."""
    from app.commands.options import hardware_part
    from planner.hardware import parse_gpu
    from planner.simulation.runs import simulate_asked

    found = simulate_asked(asked, parse_gpu(hardware_part({"gpu": gpu})))
    if as_json:
        print_json(document(found))
        return
    for name, one in (("continuous", found.continuous), ("static", found.static)):
        print_simulated(name, found, one.to_dict())
    _print_capacities(found)
    print_line(f"Simulated, nothing ran. Step times: {found.source}.")


def document(found: SimulatedRun) -> dict[str, Any]:
    """Return the JSON answer."""
    from planner.simulation.runs import engine_capacities
    from planner.workload import flat_dict

    return {
        "schema": 1,
        "serve": found.run.to_dict() | {"trace": len(found.run.trace)},
        "gpu": found.gpu.to_dict(),
        "source": found.source,
        "continuous": found.continuous.to_dict(),
        "static": found.static.to_dict(),
        "capacity": [flat_dict(one) for one in engine_capacities(found)],
    }


def _print_capacities(found: SimulatedRun) -> None:
    from planner.serving.capacity import CAPACITY_COLUMNS, capacity_cells
    from planner.simulation.runs import engine_capacities

    held = engine_capacities(found)
    cells = list(zip(CAPACITY_COLUMNS, *capacity_cells(held), strict=True))
    title = (
        f"What {found.gpu.name} holds of requests of {held[0].length:,} tokens, engine by engine"
    )
    print_table(make_table(title, cells[0][:1], cells[0][1:], cells[1:]))
    for note in dict.fromkeys(note for one in held for note in one.notes):
        print_line(note)


def print_simulated(name: str, found: SimulatedRun, counted: Mapping[str, Any]) -> None:
    """Print one way of batching: a headline, the percentiles, queue and cache."""
    from planner.serve_run import SERVE_COLUMNS, serve_cells
    from planner.simulation.words import simulated_headline, simulated_rest

    title = f"{name.capitalize()} batching on {found.gpu.name}: {simulated_headline(counted)}"
    print_table(make_table(title, SERVE_COLUMNS[:1], SERVE_COLUMNS[1:], serve_cells(counted)))
    print_line(simulated_rest(counted))
