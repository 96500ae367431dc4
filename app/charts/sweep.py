"""The figure of a sweep: speed against memory, the Pareto front drawn, a colour per number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    add_capacity_line,
    axis_unit,
    base_figure,
    size_text,
    translucent,
    wrapped,
)
from planner.choice import choice_words
from planner.units import format_count, format_share

HEIGHT_PX = 460
# From few GPUs to many; mid-tones for the light and the dark page.
COLOURS = (
    *("#7D8796", "#3B7BDB", "#159FB2", "#34A05C", "#A58A2C", "#D58512", "#E0573F", "#D64C80"),
    *("#8663DA", "#4F5B6B"),
)
BEST_COLOUR = "#C9A100"
Row = Mapping[str, Any]


def sweep_figure(
    front: Sequence[Row],
    others: Sequence[Row],
    best: Row | None,
    capacity_bytes: int,
    unit: str,
) -> go.Figure:
    """Return tokens/s over device bytes per GPU of swept rows, hollow as predictions are.

    `front` and `others` are rows of a sweep with their number in `row`, which is a point's first
    customdata; `best` is marked with a star.
    """
    divisor, unit_name = axis_unit(capacity_bytes, unit)
    figure = base_figure(HEIGHT_PX)
    numbers = sorted({row["gpus"] for row in (*front, *others)})
    colours = {number: COLOURS[i % len(COLOURS)] for i, number in enumerate(numbers)}
    if others:
        figure.add_scatter(
            name="not on the front",
            **_points(others, divisor, unit),
            mode="markers",
            marker={
                "symbol": "circle-open",
                "size": 5,
                "color": [translucent(colours[row["gpus"]], 0.45) for row in others],
            },
        )
    for number in numbers:
        rows = sorted((r for r in front if r["gpus"] == number), key=lambda r: r["device_bytes"])
        if rows:
            figure.add_scatter(
                name=f"{number:,} GPU{'s' if number > 1 else ''}",
                **_points(rows, divisor, unit),
                mode="lines+markers",
                line={"color": colours[number], "width": 1.5, "shape": "hv"},
                marker={
                    "symbol": "circle-open",
                    "size": 9,
                    "color": colours[number],
                    "line": {"width": 2},
                },
            )
    if best is not None:
        _star(figure, best, divisor, unit)
    reach = 1.04 * capacity_bytes / divisor
    label = f"one GPU, {size_text(capacity_bytes, unit)}"
    add_capacity_line(figure, capacity_bytes / divisor, label, reach)
    figure.update_xaxes(title=f"{unit_name} of device memory per GPU", range=[0, reach])
    figure.update_yaxes(title="tokens/s of all GPUs", type="log", dtick=1, tickformat="~s")
    figure.update_layout(hovermode="closest")
    return figure


def _star(figure: go.Figure, best: Row, divisor: int, unit: str) -> None:
    figure.add_scatter(
        name="the best, replayed",
        x=[best["device_bytes"] / divisor],
        y=[best["tokens_per_s"]],
        mode="markers",
        marker={
            "symbol": "star-open",
            "size": 18,
            "color": BEST_COLOUR,
            "line": {"width": 2},
        },
        text=[hover_text(best, unit)],
        hovertemplate="%{text}<extra></extra>",
    )


def _points(rows: Sequence[Row], divisor: int, unit: str) -> dict[str, Any]:
    return {
        "x": [row["device_bytes"] / divisor for row in rows],
        "y": [row["tokens_per_s"] for row in rows],
        "customdata": [[row["row"]] for row in rows],
        "text": [hover_text(row, unit) for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
    }


def hover_text(row: Row, unit: str) -> str:
    """Return the choices of a row and what it reaches, broken into lines."""
    cost = row.get("cost_per_million_tokens")
    price = "" if cost is None else f"<br>{cost:.4g} per million tokens"
    return (
        f"<b>{wrapped(choice_words(row))}</b>"
        f"<br>{format_count(row['tokens_per_s'])} tokens/s, "
        f"{format_count(row['tokens_per_s_per_gpu'])} per GPU, "
        f"MFU {format_share(row['mfu'])}"
        f"<br>{size_text(row['device_bytes'], unit)} of device memory per GPU{price}"
    )
