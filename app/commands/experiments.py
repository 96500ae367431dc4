"""`peakmark experiments`: named sets of runs, whether their differences are real, and their tables."""

from __future__ import annotations

import csv
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
    from app.experiment_rows import Analysis, Findings
    from db.engine import Database
    from db.experiments import Experiment

app = typer.Typer(help="List experiments, show one and write its tables.", no_args_is_help=True)
Named = Annotated[str, typer.Argument(metavar="NAME", help="The experiment's name or number.")]
FigureOption = Annotated[
    str | None, typer.Option(help="Such as 'step time'; the first that the runs have if left out.")
]
BaselineOption = Annotated[int, typer.Option(min=1, help="The group that others are set against.")]


@app.command("list")
def list_command(json: JsonFlag = False) -> None:
    """List all experiments with how many runs each holds."""
    from dataclasses import asdict

    from db.experiments import list_experiments

    with opened_database() as database:
        found = list_experiments(database)
    if json:
        print_json({"schema": 1, "experiments": [asdict(one) for one in found]})
    elif found:
        rows = [(one.name, str(one.id), f"{one.members:,}") for one in found]
        print_table(make_table("Experiments", ("name",), ("number", "runs"), rows))
    else:
        print_line("There is no experiment yet: make one on the Experiments page.")


@app.command("show")
def show_command(
    name: Named,
    figure: FigureOption = None,
    baseline: BaselineOption = 1,
    json: JsonFlag = False,
) -> None:
    """Show an experiment's groups of repeats against a baseline, and what may be concluded."""
    from app.experiment_rows import (
        drift_sentence,
        findings,
        group_csv,
        group_rows,
        throttled_sentence,
    )
    from planner.units import format_bytes

    analysis = _analysed(name)
    shown, base = _chosen(analysis, figure, baseline)
    found = findings(analysis, base, shown)
    conditions = [one for one in (drift_sentence(analysis), throttled_sentence(analysis)) if one]
    if json:
        said = {"answers": found.answers, "mixed": found.mixed, "cautions": found.cautions}
        groups = group_csv(analysis, base, shown)
        notes = [*analysis.notes, *conditions]
        print_json({"schema": 1, "figure": shown, "groups": groups, "notes": notes, **said})
        return
    for line in (*analysis.notes, *conditions):
        print_line(line)
    rows = group_rows(analysis, base, shown, format_bytes, every=False)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [tuple(str(row.get(column, "")) for column in columns) for row in rows]
    print_table(make_table(f"{name}: {shown} of each spec", tuple(columns), (), cells))
    print_findings(found)


def print_findings(found: Findings) -> None:
    """Print comparisons that change both kinds of variables first, then answers and cautions."""
    from app.experiment_rows import groups_named

    for said in (found.mixed, found.answers, found.cautions):
        for text, numbers in said.items():
            print_line(f"{groups_named(numbers)}: {text}")


@app.command("export")
def export_command(
    name: Named,
    file: Annotated[Path, typer.Argument(help="The .csv file to write.")],
    runs: Annotated[
        bool, typer.Option("--runs", help="One line per run, in place of one per group.")
    ] = False,
    figure: FigureOption = None,
    baseline: BaselineOption = 1,
    json: JsonFlag = False,
) -> None:
    """Write an experiment's groups, or its runs, as CSV with plain numbers."""
    from app.experiment_rows import group_csv, run_rows

    analysis = _analysed(name)
    shown, base = _chosen(analysis, figure, baseline)
    rows = run_rows(analysis, shown, None) if runs else group_csv(analysis, base, shown)
    _write(file, rows)
    if json:
        print_json({"schema": 1, "file": str(file), "rows": len(rows)})
    else:
        print_line(f"{len(rows)} rows written to {file}")


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        with file.open("w", encoding="utf-8", newline="") as target:
            writer = csv.DictWriter(target, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        sentence = f"{file} cannot be written: {error.strerror}."
        raise InputError("file", str(file), "a file that can be written", sentence) from None


def _analysed(name: str) -> Analysis:
    """Work out the experiment of a name or number; raises InputError where there is none."""
    from app.experiment_rows import analyse

    with opened_database() as database:
        return analyse(database, _named(database, name).id)


def _named(database: Database, name: str) -> Experiment:
    from db.experiments import list_experiments

    found = list_experiments(database)
    for one in found:
        if one.name.casefold() == name.strip().casefold() or str(one.id) == name:
            return one
    sentence = f"There is no experiment {name[:80]!r}: `peakmark experiments list` names them."
    raise InputError("name", name, "the name or number of an experiment", sentence)


def _chosen(analysis: Analysis, figure: str | None, baseline: int) -> tuple[str, int]:
    """Return the figure to show and the baseline's place; raises InputError for what there is not."""
    from planner.experiments.groups import known_figures

    known = known_figures(list(analysis.lines))
    if not known:
        sentence = (
            "No run of this experiment has a figure yet: `peakmark runs` says how they stand."
        )
        raise InputError("name", None, "an experiment with ended runs", sentence)
    if figure is not None and figure not in known:
        allowed = ", ".join(known)
        sentence = f"--figure is {figure[:60]!r}: it must be one of {allowed}."
        raise InputError("figure", figure, allowed, sentence)
    if baseline > len(analysis.groups):
        allowed = f"from 1 to {len(analysis.groups)}"
        sentence = f"--baseline is {baseline}: it must be {allowed}."
        raise InputError("baseline", baseline, allowed, sentence)
    return figure or known[0], baseline - 1
