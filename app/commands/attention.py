"""`peakmark attention`: what kernels and algorithms of attention cost at a shape, and measuring it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import (
    CUSTOM_GPU_OPTIONS,
    SIZE_OPTIONS,
    TARGET_OPTIONS,
    plan_from,
    with_options,
)
from app.commands.output import JsonFlag, make_table, print_json, print_line, print_table, styled
from app.commands.queued import exit_unless_done, say_outcome
from app.commands.store import opened_database

if TYPE_CHECKING:
    from db.views import RunDetail
    from planner.attention.answer import AttentionAnswer
    from planner.attention.measured import Seen
    from planner.attention.problem import AttentionProblem, Variant

WORDS = ("variant", "exact", "backend")
FIGURES = (
    *("forward GFLOP", "forward HBM", "forward", "backward", "measured"),
    *("peak", "measured peak", "fits up to", "apart"),
)
PLAN_OPTIONS: Mapping[str, Any] = {
    name: TARGET_OPTIONS[name] for name in ("model", "config", "gpu", *CUSTOM_GPU_OPTIONS)
} | {name: SIZE_OPTIONS[name] for name in ("micro_batch", "seq")}


def _whole(text: str) -> Any:
    return Annotated[int | None, typer.Option(help=text, show_default="the plan's")]


def _pattern(text: str, default: str) -> Any:
    return Annotated[int | None, typer.Option(help=text, show_default=default)]


# By the name of the problem's field.
SHAPE_OPTIONS: Mapping[str, Any] = {
    "heads": _whole("Query heads."),
    "kv_heads": _whole("Key-value heads."),
    "head_dim": _whole("Head size."),
    "causal": Annotated[
        bool | None, typer.Option("--causal/--full", help="The mask.", show_default="causal")
    ],
    "dtype": Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")],
    "window": _pattern("Tokens of a window.", "the model's, else 4096 or S / 4"),
    "global_tokens": _pattern("First tokens that all see, of global_local.", "128"),
    "block": _pattern("Tokens of a block, of block_sparse.", "128"),
    "block_stride": _pattern("One block in so many is seen, of block_sparse.", "4"),
}


@with_options(PLAN_OPTIONS, SHAPE_OPTIONS)
def attention_command(
    *,
    chosen: Mapping[str, Any],
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Some of eager, sdpa, triton, window, global_local, block_sparse, linear, by commas.",
            show_default="all",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run them on this machine, and compare.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Predict FLOPs, HBM bytes, memory and time of attention's kernels and algorithms; measure them.

    With --measure, exit code 0 when the run is done, else 1.
    """
    from planner.attention.answer import answer
    from planner.attention.problem import Variant, parse_variants

    plan = plan_from({name: chosen[name] for name in PLAN_OPTIONS})
    problem = problem_from(plan, chosen)
    variants = parse_variants(kernels.split(",")) if kernels is not None else tuple(Variant)
    found = answer(problem, variants, plan.hardware)
    detail = run(found, quiet=json) if measure else None
    seen = seen_in(detail)
    if json:
        print_json(document(found, detail, seen))
    else:
        report(found, detail, seen)
    if detail is not None:
        exit_unless_done(detail)


def problem_from(plan: Any, chosen: Mapping[str, Any]) -> AttentionProblem:
    """Return the plan's attention with what the options change; raises PlanError."""
    from planner.attention.of_plan import problem_of_plan

    changes = {name: chosen[name] for name in SHAPE_OPTIONS if chosen[name] is not None}
    return problem_of_plan(plan, changes)


def run(found: AttentionAnswer, *, quiet: bool) -> RunDetail:
    """Queue the run of an answer's variants and wait for its end; raises InputError without room."""
    from app.attention_job import queue, too_big_for_host
    from app.commands.output import InputError
    from app.commands.prove import Watch
    from planner.attached import attached_gpus

    world = "nccl" if attached_gpus().gpus else "cpu"
    reason = too_big_for_host(found) if world == "cpu" else None
    if reason is not None:
        raise InputError("seq", found.problem.sequence_length, "what this host can hold", reason)
    with opened_database() as database:
        run_id = queue(database, found, world, key=uuid.uuid4().hex, who="command line")
        return Watch(database=database, run_id=run_id, quiet=quiet).until_finished()


def seen_in(detail: RunDetail | None) -> dict[Variant, Seen]:
    """Return what a run measured, by variant."""
    from planner.attention.measured import seen_in_row

    if detail is None:
        return {}
    rows = seen_in_row(
        detail.spec, detail.measured or {}, detail.environment or {}, row=None, here=True
    )
    return {one.variant: one for one in rows}


def document(
    found: AttentionAnswer, detail: RunDetail | None, seen: Mapping[Variant, Seen]
) -> dict[str, Any]:
    """Return the JSON answer: the prediction, and the run with what it measured."""
    measured = [one.to_dict() for one in seen.values()]
    run_document = None if detail is None else detail.to_dict()
    return {"schema": 1, **found.to_dict(), "run": run_document, "measured": measured}


def print_attention(detail: RunDetail) -> None:
    """Print what a stored run measured beside today's prediction for its GPU."""
    from app.attention_job import answer_of_run

    found = answer_of_run(detail.spec, detail.prediction, detail.environment)
    if found is not None:
        report(found, None, seen_in(detail))


def report(found: AttentionAnswer, detail: RunDetail | None, seen: Mapping[Variant, Seen]) -> None:
    """Print a line per variant, kernels first, what is not exact, and why some cannot run."""
    from planner.attention.answer import WORDS as NAMES

    problem = found.problem
    title = (
        f"{problem.batch} x {problem.sequence_length:,} tokens, {problem.heads}/{problem.kv_heads} "
        f"heads of {problem.head_dim}, {problem.dtype}, {'causal' if problem.causal else 'full'}, "
        f"{found.gpu.name}; times by {found.rates}"
    )
    print_table(make_table(title, WORDS, FIGURES, list(rows(found, seen))))
    for one in found.variants:
        if not one.exact:
            print_line(f"{NAMES[one.variant]} is {one.exactness}")
    for name, reason in found.refused.items():
        print_line(f"{name} is not shown: {reason}")
    if detail is not None:
        say_outcome(detail)


def rows(found: AttentionAnswer, seen: Mapping[Variant, Seen]) -> Iterator[Sequence[Any]]:
    """Yield the cells of each variant's line; red where it does not fit the GPU."""
    from planner.attention.answer import WORDS as NAMES
    from planner.units import format_bytes, format_seconds

    for one in found.variants:
        row = seen.get(one.variant)
        peak = max(one.forward_peak_bytes, one.backward_peak_bytes)
        held = format_bytes(peak)
        yield (
            NAMES[one.variant],
            "yes" if one.exact else "no",
            ", ".join(dict.fromkeys((one.forward_backend, one.backward_backend))),
            f"{one.forward.flops / 1e9:,.4g}",
            format_bytes(one.forward.hbm_bytes),
            format_seconds(one.forward.time_s),
            format_seconds(one.backward.time_s),
            *measured_cells(row)[:1],
            held if one.fits else styled(held, "red"),
            *measured_cells(row)[1:2],
            "-" if one.longest is None else f"{one.longest:,}",
            *measured_cells(row)[2:],
        )


def measured_cells(row: Seen | None) -> tuple[str, str, str]:
    """Return times, peak and distance from exact attention of a measurement; dashes without one."""
    from planner.units import format_bytes, format_seconds, format_share

    if row is None:
        return "-", "-", "-"
    times = [row.forward_s, row.backward_s]
    shown = " + ".join("-" if time is None else format_seconds(time) for time in times)
    if row.outcome.startswith("oom"):
        shown = f"{shown} (out of memory in {row.stage})"
    peak = row.backward_peak_requested_bytes
    apart = row.apart_from_exact
    return (
        shown,
        "-" if peak is None else format_bytes(peak),
        "-" if apart is None else format_share(apart),
    )
