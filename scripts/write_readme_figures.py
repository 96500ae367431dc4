"""Write README.md's paragraph of errors from the tables of docs/accuracy.md.

Run by `make accuracy`, after docs/accuracy.md was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ACCURACY = ROOT / "docs" / "accuracy.md"
_PARAGRAPH = re.compile(r"^Against \d.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
_WIDTH = 100
_COUNTERS = ("allocated", "reserved", "device")
Table = Mapping[str, Sequence[str]]


def table(document: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of the table below a heading, by what stands in their first column."""
    section = document.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {row[0]: row[1:] for row in rows}


def paragraph(accuracy: str) -> str:
    """Return the paragraph, wrapped, with the figures of docs/accuracy.md."""
    every, held_out = (
        table(accuracy, "All rows but those of calibration"),
        table(accuracy, "Rows held out"),
    )
    verdicts, step = table(accuracy, "Verdicts"), every["step_time"]
    ran_out = {state: int(cells[1]) for state, cells in verdicts.items()}
    words = (
        f"Against {every['allocated'][0]} recorded H200 training steps predicted bytes err, on average and "
        f"at worst, by {_errors(every)}; in the {held_out['allocated'][0]} that were held out, chosen "
        f'before and used for nothing, by {_errors(held_out)}. Of the plans called "fits" '
        f"{ran_out['fits'] or 'none'} ran out of memory, of the {sum(map(int, verdicts['does not fit']))} "
        f'called "does not fit" {ran_out["does not fit"]} did. **Speed is not there yet**: a step\'s '
        f"time errs by {step[2]} on average and by up to {_worst(step)} ({step[0]} steps of ranks that "
        f"were all real)."
    )
    return _wrapped(words)


def _errors(rows: Table) -> str:
    return ", ".join(f"{rows[name][2]} and {_worst(rows[name])} ({name})" for name in _COUNTERS)


def _worst(cells: Sequence[str]) -> str:
    return cells[4].lstrip("+-")


def _wrapped(words: str) -> str:
    """Break a paragraph into lines, no number apart from its unit."""
    kept = words.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = [""]
    for word in kept.split(" "):
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip(" ")
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}%", " %")


def rewritten(readme: str, accuracy: str) -> str:
    """Return README.md with today's paragraph; raises ValueError where it has none to replace."""
    if not _PARAGRAPH.search(readme):
        raise ValueError("README.md has no paragraph that begins with 'Against' and a number")
    return _PARAGRAPH.sub(lambda _: paragraph(accuracy), readme, count=1)


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(), ACCURACY.read_text()))
