"""`peakmark import`: load recorded rows, or the export of another machine, into the database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.output import JsonFlag, print_json, print_line
from app.commands.store import opened_database


def import_command(
    file: Annotated[Path, typer.Argument(help="A .jsonl file in the recorded/ format.")],
    json: JsonFlag = False,
) -> None:
    """Load measurements from a file; rows that are there already are left alone."""
    from db.recorded import load_rows
    from planner.records import read_file

    rows = read_file(file)
    with opened_database() as database:
        added = load_rows(database, rows)
    if json:
        print_json({"schema": 1, "file": str(file), "rows": len(rows), "added": added})
    else:
        print_line(f"{len(rows)} rows read from {file}, {added} of them new")
