"""Write the measured part of docs/quality.md from recorded/: what changes did to answers on a GPU.

Part of `make accuracy`; the text around the two marks is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.quality_run import (
    QUALITY_COLUMNS,
    Variable,
    quality_cells,
    quality_sentences,
    quality_title,
)
from planner.records import Kind, RecordedRow, read_file

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "quality.md"
BEGIN = "<!-- Written by `make accuracy` from recorded/; do not edit from here. -->"
END = "<!-- To here. -->"
TITLES = {
    Variable.SYSTEM: "System variables, the same model run otherwise:",
    Variable.ALGORITHM: "Algorithm variables, another model:",
}


def recorded_rows(root: Path) -> list[RecordedRow]:
    """Return the probes of every file, in the order of their names."""
    files = sorted((root / "recorded").glob("*.jsonl"))
    rows = [row for path in files for row in read_file(path)]
    return [row for row in rows if row.kind is Kind.QUALITY and row.outcome == "done"]


def render(text: str, rows: Sequence[RecordedRow]) -> str:
    """Return the document with everything between its marks written anew.

    Raises ValueError where a mark is missing.
    """
    for mark in (BEGIN, END):
        if text.count(mark) != 1:
            raise ValueError(f"docs/quality.md must hold the line {mark!r} once")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join((before + BEGIN, *measured_part(rows), END + after))


def measured_part(rows: Sequence[RecordedRow]) -> Iterator[str]:
    """Yield the lines between the marks: for each probe its models, system and algorithm apart."""
    yield "\n## Measured on a GPU"
    if not rows:
        yield "\nNo probe has been recorded yet."
    for row in rows:
        versions = row.environment.get("versions") or {}
        gpu = (row.environment.get("gpu") or {}).get("name", "a CPU")
        dtype = row.spec["quality"].get("dtype", "bf16")
        yield f"\n### {gpu}, torch {versions.get('torch')}, model in {dtype}\n"
        yield from (f"- {line}" for line in quality_sentences(row.measured))
        for name, part in row.measured["models"].items():
            yield from _tables(name, part)


def _tables(name: str, part: Mapping[str, Any]) -> Iterator[str]:
    settings = ", ".join(f"{key} {value}" for key, value in part["settings"].items())
    yield f"\n**{quality_title(name, part)}** ({settings}; rounding: {part['floor']:.2g})"
    exact, *rest = quality_cells(part)
    place = QUALITY_COLUMNS.index("variable")
    for variable, title in TITLES.items():
        shown = [cells for cells in rest if cells[place] == variable]
        if not shown:
            continue
        yield f"\n{title}\n"
        yield f"| {' | '.join(QUALITY_COLUMNS)} |"
        yield "|---|---|" + "--:|" * (len(QUALITY_COLUMNS) - 3) + "---|"
        yield from (f"| {' | '.join(cells)} |" for cells in (exact, *shown))


if __name__ == "__main__":
    DOCUMENT.write_text(
        render(DOCUMENT.read_text(encoding="utf-8"), recorded_rows(ROOT)), encoding="utf-8"
    )
