"""`peakmark sweep`: what fits over ZeRO stage, world size, micro-batch and sequence length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import TARGET_OPTIONS, plan_from, with_options
from app.commands.output import (
    VERDICT_STYLES,
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_table,
    styled,
)

MAX_POINTS = 100_000
# Up to here every plan's allocator is replayed, as `peakmark plan` does; beyond, the plan's share.
MAX_REPLAYED_PLANS = 64
LIST_OPTIONS: Mapping[str, Any] = {
    "zero": Annotated[
        str | None, typer.Option(help="ZeRO stages, such as 1,3.", show_default="all of the engine")
    ],
    "gpus": Annotated[
        str | None,
        typer.Option(help="World sizes, such as 1,8,64.", show_default="1,2,4,8,16,32,64"),
    ],
    "micro_batch": Annotated[
        str | None, typer.Option(help="Micro-batches, such as 1,2,4.", show_default="1")
    ],
    "seq": Annotated[
        str | None, typer.Option(help="Sequence lengths, such as 2048,8192.", show_default="4096")
    ],
}
if TYPE_CHECKING:
    from planner.plan import Plan

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)


@with_options(TARGET_OPTIONS, LIST_OPTIONS)
def sweep_command(*, chosen: Mapping[str, Any], json: JsonFlag = False) -> None:
    """Show which of many training plans fit: every combination of the lists given."""
    from app.engine_stages import possible_stages
    from planner.search import grid
    from planner.workload import TrainingWorkload

    axes = {name: read_list(name, chosen[name]) for name in LIST_OPTIONS}
    plan = plan_from({name: chosen[name] for name in TARGET_OPTIONS} | first_of_each(axes))
    assert isinstance(plan.workload, TrainingWorkload)
    stages = axes["zero"] or possible_stages(plan.parallelism.engine)
    lists = {
        "zero_stages": stages,
        "world_sizes": axes["gpus"] or default_worlds(plan),
        "micro_batches": axes["micro_batch"] or (plan.workload.micro_batch,),
        "sequence_lengths": axes["seq"] or (plan.workload.sequence_length,),
    }
    size = check_size(lists)
    points = list(grid(plan, **lists, replay=size <= MAX_REPLAYED_PLANS).records())
    if json:
        print_json({"schema": 1, "plan": plan.to_dict(), "points": points})
    else:
        print_table(fit_table(points, stages))


def default_worlds(plan: Plan) -> tuple[int, ...]:
    """Return the world sizes of a sweep that names none; ranks that split experts divide them."""
    shards = plan.parallelism.expert_parallel
    return tuple(world for world in WORLD_SIZES if world % shards == 0) or (
        plan.parallelism.world_size,
    )


def read_list(name: str, text: str | None) -> tuple[int, ...]:
    """Read integers separated by commas; raises InputError naming the option."""
    if text is None:
        return ()
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        allowed = "integers separated by commas"
        sentence = f"--{name.replace('_', '-')} is {text[:60]!r}: it must be {allowed}."
        raise InputError(name, text, allowed, sentence) from None


def first_of_each(axes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return one value per list given, so that the plan's own checks see the extremes."""
    return {name: values[0] for name, values in axes.items() if values}


def check_size(lists: Mapping[str, tuple[int, ...]]) -> int:
    """Return a grid's number of plans; refuse one that would take more than a second or so."""
    from math import prod

    points = prod(len(values) for values in lists.values())
    if points > MAX_POINTS:
        allowed = f"at most {MAX_POINTS:,} plans"
        raise InputError("sweep", points, allowed, f"The sweep has {points:,} plans: {allowed}.")
    return points


def fit_table(points: Iterable[Mapping[str, Any]], stages: Iterable[int]) -> Any:
    """Build the table: one row per sequence length, micro-batch and world size, stages across."""
    from planner.units import format_bytes

    cells: dict[tuple[int, int, int], dict[int, Any]] = defaultdict(dict)
    for point in points:
        key = (point["sequence_length"], point["micro_batch"], point["world_size"])
        size = format_bytes(point["device_bytes"])
        cells[key][point["zero_stage"]] = styled(size, VERDICT_STYLES[point["verdict"]])
    columns = ("sequence", "micro-batch", "GPUs", *(f"ZeRO-{stage}" for stage in stages))
    rows = [
        (*(f"{part:,}" for part in key), *(row[stage] for stage in stages))
        for key, row in sorted(cells.items())
    ]
    title = "Device memory per GPU (green: fits, yellow: tight, red: does not fit)"
    return make_table(title, (), columns, rows)
