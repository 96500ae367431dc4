"""`peakmark trace`: what a model of any architecture keeps in a training step, for its plans."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

if TYPE_CHECKING:
    from planner.traced_file import TraceFile

ATTENTIONS = ("eager", "sdpa")
CHECKPOINTINGS = ("none", "full", "selective")
# What a precision computes in; `mixed` and `bf16` share their traces.
COMPUTE_OF = {"mixed": "bf16", "bf16": "bf16", "fp32": "fp32", "autocast": "autocast"}


def trace_command(
    *,
    model: Annotated[str, typer.Argument(help="A config.json, a hub id (owner/name) or a preset.")],
    attention: Annotated[
        str | None, typer.Option(help="eager or sdpa; both if left out.", show_default=False)
    ] = None,
    precision: Annotated[
        str, typer.Option(help="mixed or bf16 (one trace serves both), fp32 or autocast.")
    ] = "mixed",
    checkpointing: Annotated[
        str | None,
        typer.Option(
            help="none, full or selective; none and full if left out.", show_default=False
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds until the trace is stopped.")
    ] = 900.0,
    json: JsonFlag = False,
) -> None:
    """Trace a model of any architecture of transformers, so that its training can be planned.

    Its real module runs without weights in a process of its own; no code of a repository runs.
    """
    from app.trace_process import run_trace
    from planner.traced import file_name, own_folder, read_trace_of, traceable_config

    hf_config, _ = traceable_config(_config_of(model))
    spec = {
        "config": hf_config,
        "attention": _chosen("attention", attention, ATTENTIONS, ATTENTIONS),
        "compute": [COMPUTE_OF[p] for p in _chosen("precision", precision, COMPUTE_OF, ())],
        "checkpointing": _chosen("checkpointing", checkpointing, CHECKPOINTINGS, ("none", "full")),
    }
    out = own_folder() / file_name(hf_config)
    with _status(quiet=json) as show:
        run_trace(spec, out, deadline_s=deadline, on_progress=show)
    file = read_trace_of(hf_config)
    if json:
        print_json(_document(file, out))
    else:
        _print_trace(file, out, model)


def _config_of(model: str) -> dict[str, Any]:
    """Return the configuration that a file, a preset or the hub has under this name."""
    from app.commands.options import is_preset
    from planner.config_input import read_config_file
    from planner.presets import resolve_model

    path = Path(model)
    if path.exists() or model.endswith(".json"):
        return read_config_file(path)
    if is_preset(model):
        return dict(resolve_model(model).hf_config)
    from planner.hub import fetch_hub_config

    return fetch_hub_config(model)


def _chosen(name: str, value: str | None, allowed: Any, default: tuple[str, ...]) -> list[str]:
    if value is None:
        return list(default)
    if value not in allowed:
        words = ", ".join(allowed)
        sentence = f"--{name} is {value!r}: it must be one of {words}."
        raise InputError(name, value, words, sentence)
    return [value]


@contextmanager
def _status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr, where it is wanted."""
    from rich.console import Console

    if quiet:
        yield lambda text: None
        return
    with Console(stderr=True).status("starting") as status:
        yield status.update


def _document(file: TraceFile, out: Path) -> dict[str, Any]:
    names = ("architecture", "transformers", "torch", "date", "num_layers", "ties_embeddings")
    return {
        "schema": 1,
        "file": str(out),
        **{name: getattr(file, name) for name in names},
        "parameters": sum(_by_group(file).values()),
        "parameters_by_group": _by_group(file),
        "variants": [
            {"key": v.key, "rows": v.rows, "first": v.first, "last": v.last} for v in file.variants
        ],
    }


def _plan_line(file: TraceFile, model: str) -> str:
    """Return the command that plans the model with something that was traced."""
    from app.state import DEFAULTS

    option = "--config" if Path(model).exists() else "--model"
    default = (DEFAULTS["attention"], COMPUTE_OF[DEFAULTS["precision"]], DEFAULTS["checkpointing"])
    keys = [tuple(v.key.split("/")) for v in file.variants]
    # The one with the most of the Plan page's choices, and options for the others.
    nearest = max(keys, key=lambda key: sum(map(str.__eq__, key, default)))
    named = zip(("attention", "precision", "checkpointing"), nearest, default, strict=True)
    others = [f" --{name} {value}" for name, value, usual in named if value != usual]
    return f"peakmark plan {option} {shlex.quote(model)}{''.join(others)}"


def _by_group(file: TraceFile) -> dict[str, int]:
    """Return the parameters of embedding, all layers and head; a tied weight counts once."""
    groups = dict.fromkeys(("embedding", "layer", "head"), 0)
    for parameter in file.parameters:
        groups[parameter.group] += parameter.numel
    return groups


def _print_trace(file: TraceFile, out: Path, model: str) -> None:
    from planner.units import format_count

    groups = _by_group(file)
    tied = ", input and output embedding tied" if file.ties_embeddings else ""
    print_line(
        f"{file.architecture}: {format_count(sum(groups.values()))} parameters in "
        f"{file.num_layers} layers{tied}; traced by transformers {file.transformers}"
    )
    names: Mapping[str, str] = {"embedding": "embedding", "layer": "all layers", "head": "head"}
    rows = [(names[group], f"{count:,}") for group, count in groups.items()]
    print_table(make_table("Parameters", ("group",), ("parameters",), rows))
    kept = dict.fromkeys(
        (v.key.replace("/", ", "), f"{v.first:,} to {v.last:,}") for v in file.variants
    )
    columns = ("attention, compute, checkpointing", "tokens per row")
    print_table(make_table("Traced", columns, (), kept))
    print_line(f"Kept in {out}. Plan it: {_plan_line(file, model)}")
