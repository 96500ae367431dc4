"""`peakmark serve`: replay a trace of requests over the serving engine here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.json_file import read_json_file
from app.commands.output import (
    InputError,
    JsonFlag,
    make_table,
    print_json,
    print_line,
    print_table,
)
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

# Far more than the largest trace that is simulated takes.


def serve_command(
    *,
    model: Annotated[
        str | None, typer.Option(help="Model: hub id or short name; llama-3.2-1b if left out.")
    ] = None,
    config: ConfigOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="A JSON list of requests, instead of the next five.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of a Poisson process.")] = 32,
    rate: Annotated[float, typer.Option(help="Its arrivals per second.")] = 8.0,
    prompt_tokens: Annotated[
        str, typer.Option(help="Fewest,most tokens of a prompt.")
    ] = "100,1000",
    new_tokens: Annotated[str, typer.Option(help="Fewest,most tokens of an answer.")] = "20,100",
    seed: Annotated[int, typer.Option(help="What the process and its lengths are drawn from.")] = 0,
    rows: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    pages: Annotated[int, typer.Option(help="Pages of the cache.")] = 1024,
    page_size: Annotated[int, typer.Option(help="Tokens of a page: 16 to 256.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a prompt run in one step.")] = 512,
    dtype: DtypeOption = None,
    cache_dtype: Annotated[
        str, typer.Option(help="model (as the weights), fp8 or int8.")
    ] = "model",
    attention: Annotated[
        str | None, typer.Option(help="peakmark (needs a GPU) or torch; by the device if left out.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="transformers or vllm, to serve the trace too; repeat for both."),
    ] = None,
    simulate: Annotated[bool, typer.Option(help="Simulate it on --gpu; nothing runs.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="GPU that --simulate is for; h200 if left out.")
    ] = None,
    world: DecodingWorldOption = None,
    deadline: DeadlineOption = 1800.0,
    json: JsonFlag = False,
) -> None:
    """Serve requests that arrive over time, with random weights, by continuous batching.

    Exit code 0 when the run is done, else 1.
    """
    _refuse_contradictions(simulate, gpu, peer, world)
    poisson = {
        "requests": requests,
        "rate_per_s": rate,
        "prompt_tokens": _pair("prompt_tokens", prompt_tokens),
        "new_tokens": _pair("new_tokens", new_tokens),
        "seed": seed,
    }
    asked: dict[str, Any] = {
        "model": decoding_model(model, config),
        "trace": poisson if trace is None else _trace_of(trace),
        "cache_dtype": cache_dtype,
        "peers": peer or [],
    } | {"rows": rows, "pages": pages, "page_size": page_size, "chunk_tokens": chunk_tokens}
    given = {"dtype": dtype, "attention": attention}
    asked |= {name: value for name, value in given.items() if value is not None}
    if simulate:
        from app.commands.simulated_serve import simulate_command

        simulate_command(asked, gpu or "h200", as_json=json)
        return
    _serve_here(asked, decoding_world(world), deadline, as_json=json)


def _refuse_contradictions(
    simulate: bool, gpu: str | None, peer: list[str] | None, world: str | None
) -> None:
    """Raise InputError for an option that would have no effect beside the others."""
    given = {"gpu": gpu} if not simulate else {"peer": peer, "world": world}
    for name, value in given.items():
        if value:
            allowed = "without --simulate" if simulate else "with --simulate"
            sentence = f"--{name} has no effect {'beside' if simulate else 'without'} --simulate: "
            sentence += (
                "leave one of them out." if simulate else "the run takes the GPU that is here."
            )
            raise InputError(name, value, allowed, sentence)


def _serve_here(asked: dict[str, Any], world: str, deadline_s: float, *, as_json: bool) -> None:
    from planner.serve_run import parse_serve

    by_world = {"dtype": "fp32", "attention": "torch"} if world == "cpu" else {}
    run, _ = parse_serve(by_world | asked)
    spec = {"schema": 1, "kind": "serve", "world": world, "serve": run.to_dict()}
    spec["deadline_s"] = deadline_s
    detail = run_here(spec, quiet=as_json)
    report(detail, as_json=as_json)
    exit_unless_done(detail)


def _pair(name: str, text: str) -> list[int]:
    try:
        low, high = (int(part) for part in text.split(","))
    except ValueError:
        option = f"--{name.replace('_', '-')}"
        sentence = f"{option} is {text[:40]!r}: it must be two numbers, as in 100,1000."
        raise InputError(name, text, "two numbers, as in 100,1000", sentence) from None
    return [low, high]


def _trace_of(path: Path) -> Any:
    said = f"--trace {path} cannot be read as JSON"
    return read_json_file("trace", path, said, "a JSON file")


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and its requests' latencies."""
    if as_json:
        print_json({"schema": 1, **detail.to_dict()})
        return
    say_outcome(detail)
    print_serving(detail)


def print_serving(detail: RunDetail) -> None:
    """Print a serving run's figures beside its simulation and peers; nothing for one that has none."""
    from planner.serve_run import (
        PEER_COLUMNS,
        SERVE_COLUMNS,
        host_sentence,
        peer_cells,
        serve_cells,
        serve_headline,
    )
    from planner.simulation.runs import (
        COMPARED_COLUMNS,
        compare_latency,
        compared_cells,
        simulated_row,
    )

    measured = detail.measured or {}
    if "latency" not in measured:
        return
    cells = serve_cells(measured)
    print_table(make_table(serve_headline(measured), SERVE_COLUMNS[:1], SERVE_COLUMNS[1:], cells))
    if spent := host_sentence(measured):
        print_line(spent)
    if peers := peer_cells(measured):
        print_table(make_table("The same trace", PEER_COLUMNS[:1], PEER_COLUMNS[1:], peers))
    if found := simulated_row(detail.spec, detail.environment, measured):
        compared = compared_cells(compare_latency(found, measured))
        title = f"Simulated on {found.gpu.name}, beside it"
        print_table(make_table(title, COMPARED_COLUMNS[:2], COMPARED_COLUMNS[2:], compared))
