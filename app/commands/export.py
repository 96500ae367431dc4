"""`peakmark export`: a plan as configuration for the programs that run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.options import (
    SERVE_OPTIONS,
    SIZE_OPTIONS,
    TARGET_OPTIONS,
    plan_from,
    with_options,
)
from app.commands.output import InputError, JsonFlag, print_json, print_line

if TYPE_CHECKING:
    from planner.export.target import Export


@with_options(TARGET_OPTIONS, SIZE_OPTIONS, SERVE_OPTIONS)
def export_command(
    *,
    chosen: Mapping[str, Any],
    to: Annotated[
        str,
        typer.Option(help="deepspeed, accelerate, fsdp2, torchtitan, torchrun, sbatch or vllm."),
    ],
    script: Annotated[
        str, typer.Option(help="The training script that torchrun and sbatch start.")
    ] = "train.py",
    folder: Annotated[
        Path | None,
        typer.Option(help="Write the files here; none is replaced.", show_default="stdout"),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Write a plan for DeepSpeed, accelerate, FSDP2, torchtitan, torchrun, Slurm or vLLM.

    What the target cannot say is told in sentences; what it cannot do is refused.
    """
    from planner.export.plan_export import export, parse_target

    found = export(plan_from(chosen), parse_target(to), script)
    if folder is not None:
        write_files(found, folder)
    if json:
        print_json({"schema": 1, **found.to_dict()})
        return
    for file in found.files:
        if folder is None:
            # As it is: a line that was wrapped to the terminal would be another command.
            sys.stdout.write(f"# {file.name}\n{file.text}\n")
        else:
            print_line(f"Wrote {folder / file.name}")
    for note in found.notes:
        print_line(f"Note: {note}")


def write_files(found: Export, folder: Path) -> None:
    """Write an export's files into a folder that is there; raises InputError, and writes none then."""
    if not folder.is_dir():
        sentence = f"--folder {folder} is no folder: name one that is there."
        raise InputError("folder", str(folder), "a folder", sentence)
    for file in found.files:
        if (folder / file.name).exists():
            sentence = f"--folder {folder} has {file.name} already: name another, or move it away."
            raise InputError("folder", str(folder), f"a folder without {file.name}", sentence)
    try:
        for file in found.files:
            with (folder / file.name).open("x", encoding="utf-8") as out:
                out.write(file.text)
    except OSError as error:
        sentence = f"--folder {folder} cannot be written: {error.strerror}."
        raise InputError("folder", str(folder), "a folder that can be written", sentence) from None
