"""`peakmark quality`: what a change of attention or of the system does to a model's answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.folders import existing_folder
from app.commands.output import JsonFlag, make_table, print_json, print_line, print_table
from app.commands.queued import (
    ConfigOption,
    DeadlineOption,
    DecodingWorldOption,
    DtypeOption,
    decoding_model,
    decoding_world,
    exit_unless_done,
    run_here,
    say_outcome,
)

if TYPE_CHECKING:
    from db.views import RunDetail


def quality_command(
    *,
    model: Annotated[
        str | None, typer.Option(help="A model beside the small one: hub id or short name.")
    ] = None,
    config: ConfigOption = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder of that model's weights; random if left out.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="paged, kernel, fp8_cache, int8_cache, window, block_sparse, linear or "
            "fewer_kv_heads; repeat for more. All if left out."
        ),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence of that model.")] = 256,
    rows: Annotated[int, typer.Option(help="Sequences of that model.")] = 2,
    dtype: DtypeOption = None,
    window: Annotated[int, typer.Option(help="Tokens that a window sees.")] = 16,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 8,
    block_stride: Annotated[int, typer.Option(help="Every how many blocks one is seen.")] = 2,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads that are left.")] = 1,
    recall_length: Annotated[int, typer.Option(help="Tokens the small model reads.")] = 64,
    recall_steps: Annotated[int, typer.Option(help="Steps that it is trained for.")] = 600,
    retrain: Annotated[
        bool, typer.Option(help="Train it with each change of the algorithm too.")
    ] = True,
    world: DecodingWorldOption = None,
    deadline: DeadlineOption = 1800.0,
    json: JsonFlag = False,
) -> None:
    """Measure what changes do to logits, perplexity and recall; system and algorithm apart.

    A small model is trained in the run to recall from far back. Exit code 0 when the run is done.
    """
    from planner.quality_run import parse_quality

    named = model is not None or config is not None
    place = decoding_world(world)
    asked: dict[str, Any] = {
        "weights": existing_folder("weights", weights),
        "length": length,
        "rows": rows,
        "window": window,
        "block": block,
        "block_stride": block_stride,
        "kv_heads": kv_heads,
        "recall_length": recall_length,
        "recall_steps": recall_steps,
        "retrain": retrain,
    }
    asked |= {"model": decoding_model(model, config)} if named else {}
    asked |= {"dtype": dtype} if dtype else {}
    asked |= {"changes": change} if change else {}
    run, _ = parse_quality(asked, place)
    spec = {"schema": 1, "kind": "quality", "world": place, "quality": run.to_dict()}
    detail = run_here(spec | {"deadline_s": deadline}, quiet=json)
    report(detail, as_json=json)
    exit_unless_done(detail)


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and what each change did."""
    if as_json:
        print_json({"schema": 1, **detail.to_dict()})
        return
    say_outcome(detail)
    print_quality(detail.measured or {})


def print_quality(measured: Mapping[str, Any]) -> None:
    """Print a probe's tables; nothing for a run that measured none."""
    from planner.quality_run import QUALITY_COLUMNS, quality_cells, quality_sentences, quality_title

    for name, part in (measured.get("models") or {}).items():
        cells = quality_cells(part)
        title = quality_title(name, part)
        print_table(make_table(title, QUALITY_COLUMNS[:2], QUALITY_COLUMNS[2:], cells))
    if measured.get("models"):
        for line in quality_sentences(measured):
            print_line(line)
