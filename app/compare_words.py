"""Differences between plans in words people read, and as numbers for a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from app.plan_links import LETTERS
from planner.difference import DifferenceRow, alike, percent, signed
from planner.units import format_count, format_seconds, format_share

NOTHING = "—"
Show = Callable[[float], str]


def value_text(row: DifferenceRow, value: Any, size: Show) -> str:
    """Return a value as people read it; a dash where a plan has no such thing."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if row.unit == "bytes" or (row.unit == "option" and row.name.endswith(" bytes")):
        return size(value)
    if row.unit in ("option", "text") or isinstance(value, str):
        return f"{value:,}" if isinstance(value, int) else str(value).replace("_", " ")
    shown = {
        "s": lambda: format_seconds(value) if value else "0",
        "share": lambda: format_share(value),
        "per_s": lambda: f"{value:,.0f}",
    }
    return shown.get(row.unit, lambda: format_count(value))()


def change_text(row: DifferenceRow, base: Any, value: Any, size: Show) -> str:
    """Return how far a value is from the baseline's, with its share; empty where that says nothing."""
    numbers = (int, float)
    if isinstance(base, bool) or isinstance(value, bool) or row.unit in ("text", "option"):
        return ""
    if not isinstance(base, numbers) or not isinstance(value, numbers) or alike(base, value):
        return ""
    change = value - base
    if row.unit == "share":
        return signed(100 * change, lambda number: f"{number:.1f} points")
    text = signed(change, lambda number: value_text(row, number, size))
    return f"{text} ({percent(change / base)})" if base > 0 else text


def difference_table(
    rows: Sequence[DifferenceRow], baseline: int, size: Show, *, changes: bool = True
) -> list[dict[str, str]]:
    """Return rows as a table: part, name, each plan's value and its change from the baseline's.

    A plan of which nothing is known has no column of changes.
    """
    lines = [_line(row, baseline, size, changes) for row in rows]
    empty = {name for name in (lines[0] if lines else ()) if not any(line[name] for line in lines)}
    return [{name: text for name, text in line.items() if name not in empty} for line in lines]


def _line(row: DifferenceRow, baseline: int, size: Show, changes: bool) -> dict[str, str]:
    line = {"part": row.group, "what": row.name}
    for index, value in enumerate(row.values):
        name = plan_name(index, baseline)
        line[name] = value_text(row, value, size)
        if changes and index != baseline:
            change = change_text(row, row.values[baseline], value, size)
            line[f"{LETTERS[index]} − {LETTERS[baseline]}"] = change
    return line


def plan_name(index: int, baseline: int) -> str:
    """Return the name of a plan's column."""
    return f"{LETTERS[index]} (baseline)" if index == baseline else LETTERS[index]


def raw_rows(rows: Sequence[DifferenceRow], baseline: int) -> list[dict[str, Any]]:
    """Return rows for a file: plain numbers in bytes, seconds and shares, with their unit."""
    return [
        {
            "part": row.group,
            "what": row.name,
            "unit": row.unit,
            **{plan_name(index, baseline): value for index, value in enumerate(row.values)},
        }
        for row in rows
    ]
