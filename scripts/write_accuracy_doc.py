"""Write docs/accuracy.md from the recorded rows: `make accuracy`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from planner.accuracy import AccuracyReport, Statistics, accuracy_report
from planner.records import RecordedRow, read_file

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "accuracy.md"
HEAD = """# Accuracy

Written by `make accuracy` from `recorded/`; do not edit. Error in percent:
100 x (predicted - measured) / measured, with today's planner. `allocated`, `reserved` and `device`
are bytes of GPU memory; `step_time` is compared only where the world keeps time
(docs/architecture.md). p90 is the 90th percentile of the absolute error, worst keeps its sign.
"""
COLUMNS = "| n | mean | mean absolute | p90 | worst |\n|---|--:|--:|--:|--:|--:|"
QUANTITY_SHOWN_BY_GROUP = "allocated"


def recorded_rows(directory: Path) -> list[RecordedRow]:
    """Return the rows of every file of a directory, in the order of their names."""
    return [row for path in sorted(directory.glob("*.jsonl")) for row in read_file(path)]


def render(report: AccuracyReport, bounds: Mapping[str, Mapping[str, object]]) -> str:
    """Return the document; the same rows always give the same text."""
    return "\n".join([HEAD, *_summary(report), *_bounds(bounds), *_groups(report)]) + "\n"


def _summary(report: AccuracyReport) -> Iterator[str]:
    yield (
        f"{report.evidence_rows} rows of evidence; {report.calibration_rows} calibration rows and "
        f"{report.other_rows} rows of other kinds are not counted."
    )
    yield (
        f"False 'fits': {len(report.false_fits)}. "
        f"False 'does not fit': {len(report.false_does_not_fit)}. "
        f"Not predicted: {len(report.not_predicted)}.\n"
    )
    yield f"| quantity {COLUMNS}"
    for quantity, statistics in report.overall().items():
        yield _line(quantity, statistics)


def _bounds(bounds: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    yield "\n## Bounds that the tests hold\n"
    yield "| quantity | bound | limit |\n|---|---|--:|"
    for quantity, limits in bounds["quantities"].items():
        assert isinstance(limits, Mapping)
        for name, limit in limits.items():
            words = name.removesuffix("_percent").replace("_", " ")
            yield f"| {quantity} | {words} | {limit} % |"


def _groups(report: AccuracyReport) -> Iterator[str]:
    yield f"\n## Error of {QUANTITY_SHOWN_BY_GROUP} by group\n"
    yield f"| group | value {COLUMNS.replace('|---|', '|---|---|')}"
    for group, values in report.by_group().items():
        for value, quantities in values.items():
            if QUANTITY_SHOWN_BY_GROUP in quantities:
                yield _line(f"{group} | {value}", quantities[QUANTITY_SHOWN_BY_GROUP])


def _line(name: str, found: Statistics) -> str:
    return (
        f"| {name} | {found.n} | {found.mean_percent:+.2f} % | {found.mean_absolute_percent:.2f} % "
        f"| {found.p90_percent:.2f} % | {found.worst_percent:+.2f} % |"
    )


def main() -> None:
    """Write the document of this repository."""
    bounds = json.loads((ROOT / "recorded" / "bounds.json").read_text())
    report = accuracy_report(recorded_rows(ROOT / "recorded"))
    DOCUMENT.write_text(render(report, bounds))


if __name__ == "__main__":
    main()
