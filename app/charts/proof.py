"""Figures of what was measured: beside its prediction, and over many runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    MEASURED_COLOUR,
    OTHER_COLOUR,
    PREDICTED_COLOUR,
    VERDICT_COLOURS,
    axis_unit,
    base_figure,
    measured_marker,
    predicted_marker,
    size_text,
    wrapped,
)
from planner.units import format_signed

ROW_HEIGHT_PX = 46
MARGIN_HEIGHT_PX = 120
TEXT_ROOM = 1.3
SMALLEST_REACH_PERCENT = 1.0


def comparison_figure(rows: Sequence[Mapping[str, Any]], unit: str) -> go.Figure:
    """Return predicted (hatched) and measured (filled) bytes of every row on one axis.

    A row holds `label`, `predicted_bytes` and `measured_bytes`; either may be None.
    """
    sizes = [row[side] or 0 for row in rows for side in ("predicted_bytes", "measured_bytes")]
    divisor, unit_name = axis_unit(max(sizes, default=0), unit)
    figure = base_figure(MARGIN_HEIGHT_PX + ROW_HEIGHT_PX * len(rows), barmode="group")
    _add_side(figure, rows, "predicted", predicted_marker(PREDICTED_COLOUR), divisor, unit)
    _add_side(figure, rows, "measured", measured_marker(MEASURED_COLOUR), divisor, unit)
    # The texts stand outside the bars, where both colour schemes can be read.
    reach = TEXT_ROOM * max(sizes, default=1) / divisor
    figure.update_xaxes(title=unit_name, range=[0, reach])
    figure.update_yaxes(autorange="reversed")
    return figure


def _add_side(
    figure: go.Figure,
    rows: Sequence[Mapping[str, Any]],
    side: str,
    marker: Mapping[str, Any],
    divisor: int,
    unit: str,
) -> None:
    shown = [row for row in rows if row[f"{side}_bytes"] is not None]
    if not shown:
        return
    texts = [size_text(row[f"{side}_bytes"], unit) for row in shown]
    figure.add_bar(
        name=side,
        y=[row["label"] for row in shown],
        x=[row[f"{side}_bytes"] / divisor for row in shown],
        orientation="h",
        text=texts,
        textposition="outside",
        cliponaxis=False,
        marker=marker,
        hovertemplate=f"%{{y}}<br>{side}: %{{text}}<extra></extra>",
    )


def residual_figure(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Return the signed error in % of every row that has both sides.

    Positive: the prediction was above the measurement. Rows as in `comparison_figure`.
    """
    both = [row for row in rows if row["predicted_bytes"] is not None and row["measured_bytes"]]
    errors = [error_percent(row["predicted_bytes"], row["measured_bytes"]) for row in both]
    figure = base_figure(MARGIN_HEIGHT_PX + 26 * len(both))
    figure.add_bar(
        y=[row["label"] for row in both],
        x=errors,
        orientation="h",
        text=[format_signed(error, 2) for error in errors],
        textposition="outside",
        cliponaxis=False,
        marker={"color": OTHER_COLOUR},
        hovertemplate="%{y}: %{text}<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(x=0, line_width=1, line_color=OTHER_COLOUR)
    reach = max([SMALLEST_REACH_PERCENT, *(TEXT_ROOM * abs(error) for error in errors)])
    figure.update_xaxes(title="(predicted − measured) / measured, %", range=[-reach, reach])
    figure.update_yaxes(autorange="reversed")
    return figure


def error_percent(predicted: float, measured: float) -> float:
    """Return 100 (predicted - measured) / measured; `measured` must not be 0."""
    return 100 * (predicted - measured) / measured


def residual_strip_figure(points: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Return one dot per stored measurement: its error in %, in the line of its group.

    A point holds `group`, `error_percent`, `label`, `role` and `row_id`, which a click gives back;
    calibration rows are grey, held-out ones blue. Groups keep the order of the points.
    """
    groups = list(dict.fromkeys(point["group"] for point in points))
    figure = base_figure(MARGIN_HEIGHT_PX + 28 * len(groups))
    colours = {
        "evidence": MEASURED_COLOUR,
        "holdout": PREDICTED_COLOUR,
        "calibration": OTHER_COLOUR,
    }
    for role, colour in colours.items():
        shown = [point for point in points if point["role"] == role]
        if shown:
            figure.add_scatter(
                name=role,
                x=[point["error_percent"] for point in shown],
                y=[point["group"] for point in shown],
                customdata=[point.get("row_id") for point in shown],
                text=[wrapped(point["label"]) for point in shown],
                mode="markers",
                marker={"color": colour, "size": 9, "opacity": 0.7},
                hovertemplate="%{text}<br>row %{customdata}<br>%{x:+.2f} %<extra>%{y}</extra>",
            )
    figure.add_vline(x=0, line_width=1, line_color=OTHER_COLOUR)
    figure.update_xaxes(title="(predicted − measured) / measured, %")
    # Plotly's own order would put the groups that have no evidence row last.
    order = {"categoryorder": "array", "categoryarray": groups}
    figure.update_yaxes(autorange="reversed", type="category", **order)
    return figure


def timing_figure(operations: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Return predicted time per operation of a step, coloured by what bounds it."""
    colours = {
        "compute": PREDICTED_COLOUR,
        "hbm": VERDICT_COLOURS["tight"],
        "interconnect": MEASURED_COLOUR,
    }
    figure = base_figure(MARGIN_HEIGHT_PX + 18 * len(operations), barmode="stack")
    for bound in dict.fromkeys(operation["bound"] for operation in operations):
        shown = [operation for operation in operations if operation["bound"] == bound]
        figure.add_bar(
            name=f"bound by {bound}",
            y=[operation["name"] for operation in shown],
            x=[operation["time_s"] * 1e3 for operation in shown],
            orientation="h",
            marker=predicted_marker(colours.get(bound, OTHER_COLOUR)),
            hovertemplate="%{y}: %{x:.3g} ms<extra></extra>",
        )
    names = [operation["name"] for operation in operations]
    figure.update_xaxes(title="ms per step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=names)
    return figure
