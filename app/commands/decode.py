"""`peakmark decode`: let a model decode on our kernels here, beside transformers' own generation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.folders import existing_folder
from app.commands.output import (
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
)
from app.commands.profile import report as report_profile
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


def decode_command(
    *,
    model: Annotated[
        str | None, typer.Option(help="Model: hub id or short name; llama-3.2-1b if left out.")
    ] = None,
    config: ConfigOption = None,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded of each sequence.")] = 64,
    dtype: DtypeOption = None,
    cache: Annotated[str, typer.Option(help="contiguous or paged.")] = "paged",
    cache_dtype: Annotated[
        str, typer.Option(help="model (as the weights), fp8 or int8.")
    ] = "model",
    page_size: Annotated[int, typer.Option(help="Tokens of a page: 16 to 256.")] = 64,
    attention: Annotated[
        str | None, typer.Option(help="peakmark (needs a GPU) or torch; by the device if left out.")
    ] = None,
    fused: Annotated[bool, typer.Option(help="Norms, rotary embedding and MLP fused.")] = True,
    graphs: Annotated[bool, typer.Option(help="Each step as one CUDA graph.")] = True,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="static, static_compiled or none; repeat for more. static if left out."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Split the time by the profiler, without peers.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --profile: a tokenizer, whose time counts as data.")
    ] = None,
    world: DecodingWorldOption = None,
    deadline: DeadlineOption = 1800.0,
    json: JsonFlag = False,
) -> None:
    """Prefill and decode with random weights over a key-value cache, beside transformers.

    Exit code 0 when the run is done, else 1.
    """
    from planner.decode_run import parse_decode

    of = decoding_model(model, config)
    chosen = decoding_world(world)
    asked = {
        "model": of,
        "batch": batch,
        "context": context,
        "new_tokens": new_tokens,
        "dtype": dtype or ("fp32" if chosen == "cpu" else "bf16"),
        "cache": cache,
        "cache_dtype": cache_dtype,
        "page_size": page_size,
        "attention": attention or ("torch" if chosen == "cpu" else "peakmark"),
        "fused": fused,
        "graphs": graphs,
        "peers": [] if profile or peer == ["none"] else list(peer or ["static"]),
    }
    _refuse_contradictions(profile, peer, tokenizer)
    run, _ = parse_decode(asked)
    kind = "profile" if profile else "decode"
    spec = {"schema": 1, "kind": kind, "world": chosen, "decode": run.to_dict()}
    spec |= {"deadline_s": deadline, "tokenizer": existing_folder("tokenizer", tokenizer)}
    detail = run_here(spec, quiet=json)
    (report_profile if profile else report)(detail, as_json=json)
    exit_unless_done(detail)


def _refuse_contradictions(profile: bool, peer: list[str] | None, tokenizer: Path | None) -> None:
    """Raise InputError for an option that would have no effect beside the others."""
    if profile and peer not in (None, ["none"]):
        sentence = "--peer is a comparison of times, which --profile does not make: leave one out."
        raise InputError("peer", peer, "without --profile", sentence)
    if tokenizer is not None and not profile:
        sentence = "--tokenizer counts in a profile only: use it with --profile."
        raise InputError("tokenizer", str(tokenizer), "with --profile", sentence)


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and its figures beside transformers'."""
    if as_json:
        print_json({"schema": 1, **detail.to_dict()})
        return
    say_outcome(detail)
    print_decode(detail.spec, detail.measured or {}, detail.environment)


def print_decode(spec: Any, measured: Any, environment: Any) -> None:
    """Print a decode run's figures; nothing for one that measured none."""
    from planner.decode_run import COLUMNS, headline, result_cells
    from planner.serving.runs import COMPARED_COLUMNS, decode_cells

    if "decode_time_s" not in measured:
        return
    title = headline(spec["decode"], measured)
    print_table(make_table(title, COLUMNS[:1], COLUMNS[1:], result_cells(measured)))
    if cells := decode_cells(spec["decode"], measured, environment):
        title = "Today's prediction beside it"
        print_table(make_table(title, COMPARED_COLUMNS[:1], COMPARED_COLUMNS[1:], cells))
    print_line(f"Attention: {measured['attention_backend']}; graphs: {measured['graphs']}")
