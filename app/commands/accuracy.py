"""`peakmark accuracy`: today's predictions against every stored measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.output import JsonFlag, make_table, print_json, print_line, print_table
from app.commands.store import opened_database, stored_rows

if TYPE_CHECKING:
    from planner.accuracy import AccuracyReport, Statistics
    from planner.records import RecordedRow

FIGURES = ("n", "mean", "mean |e|", "p90 |e|", "worst")


def accuracy_command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Files of recorded rows, not the database."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Recompute the prediction of every stored measurement and show the errors in percent."""
    from planner.accuracy import accuracy_report
    from planner.ranking import ranking_report

    rows = read_rows(files or [])
    report = accuracy_report(rows)
    ranking = ranking_report(rows, report.residuals)
    if json:
        print_json({**report.to_dict(), "ranking": ranking.to_dict()})
        return
    print_line(rows_sentence(report))
    overall = overall_rows(report.overall())
    print_table(make_table("All non-calibration rows", ("quantity",), FIGURES, overall))
    if report.holdout_rows:
        held = overall_rows(report.holdout())
        print_table(make_table("Holdout rows", ("quantity",), FIGURES, held))
    if report.served:
        served = overall_rows(report.served_overall())
        print_table(make_table("Decode and serve rows", ("quantity",), FIGURES, served))
    words = ("group", "value", "quantity")
    print_table(make_table("By group", words, FIGURES, group_rows(report)))
    ends = ("ran", "out of memory")
    print_table(make_table("Verdicts", ("verdict",), ends, verdict_rows(report)))
    print_line(verdict_sentence(report))
    print_line(ranking.sentence())
    print_line(ranking.repeats_sentence())
    for row_id, reason in report.not_predicted.items():
        print_line(f"Not predicted: {row_id}: {reason}")


def read_rows(files: list[Path]) -> list[RecordedRow]:
    """Return the rows of the files given, else of the database."""
    from planner.records import read_file

    if files:
        return [row for file in files for row in read_file(file)]
    with opened_database() as database:
        return stored_rows(database)


def rows_sentence(report: AccuracyReport) -> str:
    """Return what was counted and what was not."""
    return (
        f"{report.evidence_rows} rows of evidence, {report.holdout_rows} of them held out; not "
        f"counted: {report.calibration_rows} calibration rows, {report.other_rows} rows of other "
        "kinds"
    )


def verdict_sentence(report: AccuracyReport) -> str:
    """Return the counts of wrong verdicts, with the rows at fault."""
    fits, refused = report.false_fits, report.false_does_not_fit
    named = f": {', '.join((*fits, *refused))}" if fits or refused else ""
    return f"False 'fits': {len(fits)}; false 'does not fit': {len(refused)}{named}"


def verdict_rows(report: AccuracyReport) -> Iterator[tuple[str, ...]]:
    """Yield one row per verdict: how many runs of it ended well, and how many did not."""
    for state, outcomes in report.confusion().items():
        yield state.replace("_", " "), *(str(number) for number in outcomes.values())


def overall_rows(quantities: Mapping[str, Statistics]) -> Iterator[tuple[str, ...]]:
    """Yield one row per quantity."""
    for quantity, statistics in quantities.items():
        yield quantity, *figures(statistics)


def group_rows(report: AccuracyReport) -> Iterator[tuple[str, ...]]:
    """Yield one row per group, value and quantity; a group of one value tells nothing new."""
    for group, values in report.by_group().items():
        if len(values) < 2:
            continue
        for value, quantities in values.items():
            for quantity, statistics in quantities.items():
                yield group, value, quantity, *figures(statistics)


def figures(statistics: Statistics) -> Iterator[str]:
    """Yield n and the errors in percent."""
    from planner.units import format_signed

    yield str(statistics.n)
    yield format_signed(statistics.mean_percent, 2)
    yield f"{statistics.mean_absolute_percent:.2f} %"
    yield f"{statistics.p90_percent:.2f} %"
    yield format_signed(statistics.worst_percent, 2)
