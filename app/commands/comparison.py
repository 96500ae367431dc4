"""Predicted and measured side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.commands.output import make_table, print_table

FIGURES = ("predicted", "measured", "error")


def comparison_rows(
    prediction: Mapping[str, Any], measured: Mapping[str, Any], world: str
) -> list[dict[str, Any]]:
    """Return quantity, predicted, measured and error in percent, where the world is honest."""
    from planner.comparison import compare

    return [
        {
            "quantity": found.quantity,
            "predicted": found.predicted,
            "measured": found.measured,
            "error_percent": found.error_percent,
        }
        for found in compare(prediction, measured, world)
    ]


def print_comparison(
    prediction: Mapping[str, Any], measured: Mapping[str, Any], world: str
) -> None:
    """Print the table of predicted against measured; nothing for a run that measured nothing."""
    from planner.comparison import TIME_QUANTITIES
    from planner.units import format_bytes, format_seconds, format_signed

    rows = []
    for row in comparison_rows(prediction, measured, world):
        show = format_seconds if row["quantity"] in TIME_QUANTITIES else format_bytes
        predicted, seen = show(row["predicted"]), show(row["measured"])
        rows.append((row["quantity"], predicted, seen, format_signed(row["error_percent"], 2)))
    if rows:
        print_table(make_table("Predicted against measured", ("quantity",), FIGURES, rows))
