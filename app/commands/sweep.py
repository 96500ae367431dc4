"""`peakmark sweep`: every combination of what is left open, the best that fits, and the Pareto front."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import TARGET_OPTIONS, plan_from, with_options
from app.commands.output import (
    VERDICT_STYLES,
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
    styled,
)

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.sweep import Swept

# Up to here every plan's allocator is replayed, as `peakmark plan` does; beyond, the plan's share.
MAX_REPLAYED_PLANS = 64
FRONT_SHOWN = 20
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
# The option's name, and that of the planner's axis.
AXIS_OF_OPTION: Mapping[str, str] = {
    "engine": "engine",
    "zero": "zero_stage",
    "gpus": "gpus",
    "micro_batch": "micro_batch",
    "grad_accumulation": "grad_accumulation",
    "seq": "sequence_length",
    "attention": "attention",
    "checkpointing": "checkpointing",
    "tensor_parallel": "tensor_parallel",
    "pipeline_parallel": "pipeline_parallel",
    "context_parallel": "context_parallel",
    "expert_parallel": "expert_parallel",
}
CHOICES = ("engine", "attention", "checkpointing")
# Where a sweep varies nothing else, the table has stages across.
GRID_OPTIONS = frozenset(("zero", "gpus", "micro_batch", "seq"))


def _list_option(text: str, default: str) -> Any:
    return Annotated[str | None, typer.Option(help=text, show_default=default)]


LIST_OPTIONS: Mapping[str, Any] = {
    "engine": _list_option("Engines, such as peakmark,fsdp2, or all.", "peakmark"),
    "zero": _list_option("ZeRO stages, such as 1,3.", "all of the engines"),
    "gpus": _list_option("GPUs of the whole job, such as 8,64 or 1-16.", "1,2,4,8,16,32,64"),
    "micro_batch": _list_option("Micro-batches, such as 1,2,4 or 1-16.", "1"),
    "grad_accumulation": _list_option(
        "Micro-batches per step, such as 1,4.", "1, or what the global batch takes"
    ),
    "seq": _list_option("Sequence lengths, such as 2048,8192.", "4096"),
    "attention": _list_option("Attention kernels, such as sdpa,triton, or all.", "sdpa"),
    "checkpointing": _list_option("Checkpointing, such as none,full, or all.", "none"),
    **{
        name: _list_option(f"{text}, such as 1,2.", "1")
        for name, text in {
            "tensor_parallel": "GPUs that split every layer's matrices",
            "pipeline_parallel": "Stages that split the layers",
            "context_parallel": "GPUs that split each sequence",
            "expert_parallel": "Ranks that split the experts",
        }.items()
    },
}
LIMIT_OPTIONS: Mapping[str, Any] = {
    "global_batch": Annotated[
        int | None, typer.Option(help="Sequences in a step of all GPUs; accumulation follows.")
    ],
    "margin": Annotated[
        float | None, typer.Option(help="Percent of each GPU to leave free.", show_default="0")
    ],
    "max_gpus": Annotated[int | None, typer.Option(help="No plan with more GPUs.")],
    "gpu_hour_cost": Annotated[
        float | None, typer.Option(help="Your price of a GPU-hour, for the cost per token.")
    ],
    "best": Annotated[
        str | None,
        typer.Option(
            help="fastest: most tokens/s; cheapest: most per GPU.", show_default="fastest"
        ),
    ],
}
NEED = {name: TARGET_OPTIONS[name] for name in TARGET_OPTIONS if name not in LIST_OPTIONS}


@with_options(NEED, LIST_OPTIONS, LIMIT_OPTIONS)
def sweep_command(*, chosen: Mapping[str, Any], json: JsonFlag = False) -> None:
    """Predict every combination of the lists given: what fits, the best, and the Pareto front."""
    from app.sweep_job import priced
    from planner.checks import check_choice, check_number
    from planner.choice import Aim, best_of, front_rows
    from planner.sweep import sweep
    from planner.sweep_axes import MAX_MARGIN, Limits, axes_of

    lists = {name: read_list(name, chosen[name]) for name in LIST_OPTIONS}
    aim = check_choice("sweep.best", chosen["best"] or "fastest", Aim)
    price = chosen["gpu_hour_cost"]
    if price is not None:
        check_number("sweep.gpu_hour_cost", price, 0.0, 1e6)
    # Said in percent, as it was given; the planner's own check speaks of the share.
    margin = chosen["margin"] or 0.0
    check_number("sweep.margin", margin, 0.0, 100 * MAX_MARGIN)
    limits = Limits(
        global_batch=chosen["global_batch"],
        margin=margin / 100,
        max_gpus=chosen["max_gpus"],
    )
    plan = base_plan({name: chosen[name] for name in NEED}, lists)
    given = {AXIS_OF_OPTION[name]: values or None for name, values in lists.items()}
    axes = axes_of(plan, {**default_axes(plan, lists), **_known(given)}, limits)
    with _shown_progress(axes.combinations) as progress:
        swept = sweep(plan, axes, limits, progress)
    if swept.planned <= MAX_REPLAYED_PLANS:
        swept = swept.replayed()
    rows, best = front_rows(swept).tolist(), best_of(swept, aim)
    front = [priced(swept.record(row), price) for row in rows]
    if json:
        print_json(
            {
                "schema": 1,
                "plan": plan.to_dict(),
                "counts": swept.counts(),
                "not_planned": dict(swept.not_planned),
                "best": best and best.to_dict(),
                "front": front,
                "points": [priced(row, price) for row in swept.records()],
            }
        )
        return
    print_answer(swept, best, front, lists)


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in given.items() if values is not None}


def read_list(name: str, text: str | None) -> tuple[Any, ...]:
    """Read values separated by commas, whole numbers also as 1-16; InputError names the option."""
    if text is None:
        return ()
    if name in CHOICES:
        return _read_choices(name, text)
    try:
        parts = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return tuple(sorted({n for ends in parts for n in _range(*ends)}))
    except (ValueError, TypeError):
        allowed = "integers separated by commas, or a range such as 1-16"
        sentence = f"--{name.replace('_', '-')} is {text[:60]!r}: it must be {allowed}."
        raise InputError(name, text, allowed, sentence) from None


def _range(first: int, last: int | None = None) -> range:
    from planner.plan import MAX_COUNT

    if last is not None and not 0 <= last - first <= MAX_COUNT:
        raise ValueError
    return range(first, (first if last is None else last) + 1)


def _read_choices(name: str, text: str) -> tuple[str, ...]:
    """Read the names of choices; the planner says of each whether it knows it."""
    from planner import workload

    kinds = {
        "engine": workload.Engine,
        "attention": workload.Attention,
        "checkpointing": workload.Checkpointing,
    }
    return tuple(map(str, kinds[name])) if text == "all" else tuple(text.split(","))


def base_plan(target: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> Plan:
    """Return the first combination of the lists that can be planned; raises what the first one does."""
    from planner.errors import PlanError

    splits = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    names = [name for name, values in lists.items() if values and name != "gpus"]
    first: PlanError | None = None
    for values in product(*(lists[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        group = 1
        for name in splits:
            group *= chosen.get(name, 1)
        shards = chosen.get("expert_parallel", 1)
        ranks = [gpus // group for gpus in lists["gpus"] if gpus % (group * shards) == 0]
        chosen["gpus"] = ranks[0] if ranks else shards
        try:
            return plan_from({**target, **chosen})
        except PlanError as problem:
            first = first or problem
    assert first is not None
    raise first


def default_axes(plan: Plan, lists: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[int]]:
    """Return the axes that a sweep varies unasked: stages and GPUs."""
    from app.engine_stages import possible_stages
    from planner.memory.parallel import group_size

    engines = lists["engine"] or (plan.parallelism.engine,)
    stages = sorted({stage for engine in engines for stage in possible_stages(engine)})
    # Ranks that split experts are a divisor of all.
    group, shards = group_size(plan.parallelism), plan.parallelism.expert_parallel
    worlds = [world for world in WORLD_SIZES if world % shards == 0]
    own = plan.parallelism.world_size
    return {"zero_stage": stages, "gpus": [world * group for world in worlds or [own]]}


@contextmanager
def _shown_progress(combinations: int) -> Iterator[Callable[[int, int], None] | None]:
    """Draw a bar on a terminal; Ctrl-C cancels the sweep."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("combinations", total=combinations)
        yield lambda done, _: bar.update(task, completed=done)


def print_answer(
    swept: Swept,
    best: Any,
    front: Sequence[Mapping[str, Any]],
    lists: Mapping[str, Sequence[Any]],
) -> None:
    """Print what fits, the best and why, and what could not be planned."""
    is_grid = all(name in GRID_OPTIONS for name, values in lists.items() if len(values) > 1)
    if is_grid and swept.planned <= MAX_REPLAYED_PLANS:
        print_table(fit_table(list(swept.records())))
    else:
        print_table(front_table(front))
    if best is None:
        print_line(
            "None of these combinations fits: leave more open, such as checkpointing or GPUs."
        )
    else:
        print_line(best.sentence())
    print_line(counts_sentence(swept.counts()))
    for reason, count in sorted(swept.not_planned.items(), key=lambda pair: -pair[1]):
        print_line(f"Not planned, {count:,} x: {reason}")


def counts_sentence(counts: Mapping[str, int]) -> str:
    """Say how many combinations ended how."""
    total = sum(counts.values())
    named = {
        "admissible": "fit",
        "too_little_margin": "fit without the margin",
        "tight": "are tight",
        "does_not_fit": "do not fit",
        "not_planned": "could not be planned",
    }
    parts = [f"{counts[name]:,} {words}" for name, words in named.items() if counts[name]]
    return f"Of {total:,} combinations {', '.join(parts)}."


def front_table(front: Sequence[Mapping[str, Any]]) -> Any:
    """Build the table of the Pareto front, fastest first."""
    from planner.choice import choice_words
    from planner.units import format_bytes, format_count

    has_cost = bool(front) and "cost_per_million_tokens" in front[0]
    columns = ["GPUs", "tokens/s", "per GPU", "device memory"]
    rows = [
        (
            choice_words(row),
            f"{row['gpus']:,}",
            format_count(row["tokens_per_s"]),
            format_count(row["tokens_per_s_per_gpu"]),
            format_bytes(row["device_bytes"]),
            *([f"{row['cost_per_million_tokens']:.4g}"] if has_cost else []),
        )
        for row in front[:FRONT_SHOWN]
    ]
    shown = f"the fastest {len(rows)} of {len(front):,}" if len(front) > len(rows) else len(rows)
    title = f"Pareto front of speed, memory and GPUs: {shown}"
    return make_table(title, ("plan",), [*columns, *(["per 1M tokens"] if has_cost else [])], rows)


def fit_table(points: Iterable[Mapping[str, Any]]) -> Any:
    """Build the table: one row per sequence length, micro-batch and GPUs, stages across."""
    from planner.units import format_bytes

    cells: dict[tuple[int, int, int], dict[int, Any]] = defaultdict(dict)
    for point in points:
        key = (point["sequence_length"], point["micro_batch"], point["gpus"])
        size = format_bytes(point["device_bytes"])
        cells[key][point["zero_stage"]] = styled(size, VERDICT_STYLES[point["verdict"]])
    stages = sorted({stage for row in cells.values() for stage in row})
    columns = ("sequence", "micro-batch", "GPUs", *(f"ZeRO-{stage}" for stage in stages))
    rows = [
        (*(f"{part:,}" for part in key), *(row.get(stage, "") for stage in stages))
        for key, row in sorted(cells.items())
    ]
    title = "Device memory per GPU (green: fits, yellow: tight, red: does not fit)"
    return make_table(title, (), columns, rows)
