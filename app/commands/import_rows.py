"""`peakmark import`: load recorded rows, or the export of another machine, into the database."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from app.commands.output import JsonFlag, print_json, print_line
from app.commands.store import opened_database


def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            exists=True,
            dir_okay=False,
            help=".jsonl files in the recorded/ format.",
        ),
    ],
    json: JsonFlag = False,
) -> None:
    """Load measurements from files; rows that are there already are left alone.

    A row that cannot be used is named on stderr and makes the exit code 1.
    """
    from db.recorded import load_files

    with opened_database() as database:
        report = load_files(database, files)
    if json:
        counts = {"loaded": report.loaded, "known": report.known}
        print_json({"schema": 1, **counts, "problems": list(report.problems)})
    else:
        print_line(f"{report.loaded} rows loaded, {report.known} were there already")
    for problem in report.problems:
        sys.stderr.write(f"peakmark: {problem}\n")
    if report.problems:
        raise typer.Exit(1)
