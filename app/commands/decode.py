"""`peakmark decode`: let a model decode on our kernels here, beside transformers' own generation."""

from __future__ import annotations

import uuid
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

if TYPE_CHECKING:
    from db.views import RunDetail

WORLDS = ("solo", "cpu")


def decode_command(
    *,
    model: Annotated[
        str | None, typer.Option(help="Model: hub id or short name; llama-3.2-1b if left out.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A Hugging Face config.json, instead of --model.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded of each sequence.")] = 64,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; fp32 on a CPU.")] = None,
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
    world: Annotated[
        str | None, typer.Option(help="solo (a GPU) or cpu; solo where there is a GPU.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds until the run is stopped.")
    ] = 1800.0,
    json: JsonFlag = False,
) -> None:
    """Prefill and decode with random weights over a key-value cache, beside transformers.

    Exit code 0 when the run is done, else 1.
    """
    from app.commands.options import model_part
    from app.commands.prove import Watch
    from db.repository import create_run
    from planner.decode_run import parse_decode

    if model is not None and config is not None:
        sentence = "--model and --config both name a model: give one of them."
        raise InputError("config", str(config), "without --model", sentence)
    chosen = world_of(world)
    asked = {
        "model": model_part({"model": model or "llama-3.2-1b", "config": config}),
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
        "peers": [] if peer == ["none"] else list(peer or ["static"]),
    }
    run, _ = parse_decode(asked)
    spec = {"schema": 1, "kind": "decode", "world": chosen, "decode": run.to_dict()}
    spec["deadline_s"] = deadline
    with opened_database() as database:
        key = uuid.uuid4().hex
        run_id = create_run(database, spec, None, None, idempotency_key=key, who="command line")
        detail = Watch(database=database, run_id=run_id, quiet=json).until_finished()
    report(detail, as_json=json)
    if detail.summary.state.value != "done":
        raise typer.Exit(1)


def world_of(world: str | None) -> str:
    """Return the world; raises InputError for one that this machine does not have."""
    from planner.attached import attached_gpus

    attached = len(attached_gpus().gpus)
    chosen = world or ("solo" if attached else "cpu")
    if chosen not in WORLDS:
        allowed = " or ".join(WORLDS)
        raise InputError("world", world, allowed, f"--world is {world!r}: it must be {allowed}.")
    if chosen == "solo" and not attached:
        sentence = "--world solo needs a GPU and none is attached: use --world cpu."
        raise InputError("world", world, "cpu", sentence)
    return chosen


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and its figures beside transformers'."""
    if as_json:
        print_json({"schema": 1, **detail.to_dict()})
        return
    summary = detail.summary
    print_line(f"Run {summary.id}: {summary.state.value} in world {summary.world.value}")
    if summary.why:
        print_line(summary.why)
    print_decode(detail.spec, detail.measured or {})


def print_decode(spec: Any, measured: Any) -> None:
    """Print a decode run's figures; nothing for one that measured none."""
    from planner.decode_run import COLUMNS, headline, result_cells

    if "decode_time_s" not in measured:
        return
    title = headline(spec["decode"], measured)
    print_table(make_table(title, COLUMNS[:1], COLUMNS[1:], result_cells(measured)))
    print_line(f"Attention: {measured['attention_backend']}; graphs: {measured['graphs']}")
