"""Figures of ZeRO stages and engines: what they hold at the peak, and what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    OTHER_COLOUR,
    add_capacity_line,
    axis_unit,
    base_figure,
    component_colour,
    measured_marker,
    predicted_marker,
    size_text,
    words,
)

BAR_PX, GAP_PX, MARGIN_PX = 17, 15, 150
# The sign of the least that a stage can hold.
IDEAL_COLOUR = "#C9A100"
COLLECTIVE_COLOURS: Mapping[str, str] = {
    "all_gather": component_colour("gathered"),
    "reduce_scatter": component_colour("gradients"),
    "all_reduce": component_colour("optimizer"),
    "broadcast": component_colour("parameters"),
}
Row = Mapping[str, Any]


def row_label(row: Row) -> str:
    """Return a row's name on an axis."""
    return f"{row['engine']} {row['zero_stage']} × {row['world_size']}"


def holds_figure(
    rows: Sequence[Row], measured: Sequence[Row], capacity_bytes: int, unit: str
) -> go.Figure:
    """Return a hatched bar of the predicted peak by component per row, and its measurement below.

    Rows as `ZeroRow.to_dict`; a measurement holds `allocated_bytes`, of which `parameters` and
    `optimizer` are known. A golden tick marks the ideal.
    """
    seen = {_place(m): m for m in measured}
    centres = _centres(rows, seen)
    largest = max((row["allocated_bytes"] for row in rows), default=0)
    divisor, unit_name = axis_unit(max(largest, *(m["allocated_bytes"] for m in measured), 0), unit)
    figure = base_figure(_height(rows, seen), barmode="stack")
    bar = BAR_PX / (BAR_PX + GAP_PX)
    for name in rows[0]["parts"] if rows else ():
        _predicted(figure, name, rows, centres, divisor, unit, bar)
    for name in ("parameters", "optimizer", "rest"):
        _measured(figure, name, rows, seen, centres, divisor, unit, bar)
    _ideal(figure, rows, centres, divisor, unit)
    reach = 1.06 * max(largest, 1) / divisor
    if capacity_bytes / divisor < reach:
        label = f"capacity {size_text(capacity_bytes, unit)}"
        add_capacity_line(figure, capacity_bytes / divisor, label, reach)
    figure.update_xaxes(title=f"{unit_name} allocated at the peak", range=[0, reach])
    _name_rows(figure, rows, centres)
    return figure


def _place(row: Row) -> tuple[Any, ...]:
    return row["engine"], row["zero_stage"], row["world_size"]


def _height(rows: Sequence[Row], seen: Mapping[Any, Row]) -> int:
    bars = len(rows) + sum(_place(row) in seen for row in rows)
    return MARGIN_PX + bars * (BAR_PX + GAP_PX)


def _centres(rows: Sequence[Row], seen: Mapping[Any, Row]) -> list[float]:
    """Where each row's predicted bar lies; a measured one takes the next place."""
    centres, at = [], 0.0
    for row in rows:
        centres.append(at)
        at += 1.75 if _place(row) in seen else 1.0
    return centres


def _name_rows(figure: go.Figure, rows: Sequence[Row], centres: Sequence[float]) -> None:
    end = (centres[-1] if centres else 0) + 1.5
    figure.update_yaxes(
        tickvals=list(centres), ticktext=[row_label(row) for row in rows], range=[end, -0.7]
    )


def _predicted(
    figure: go.Figure,
    name: str,
    rows: Sequence[Row],
    centres: Sequence[float],
    divisor: int,
    unit: str,
    bar: float,
) -> None:
    sizes = [row["parts"][name] for row in rows]
    if not any(sizes):
        return
    figure.add_bar(
        name=words(name),
        y=list(centres),
        x=[size / divisor for size in sizes],
        width=bar,
        orientation="h",
        customdata=[[row_label(r), size_text(s, unit)] for r, s in zip(rows, sizes, strict=True)],
        marker=predicted_marker(component_colour(name)),
        hovertemplate=f"%{{customdata[0]}}, predicted<br><b>{words(name)}</b>: "
        "%{customdata[1]}<extra></extra>",
    )


def _measured(
    figure: go.Figure,
    name: str,
    rows: Sequence[Row],
    seen: Mapping[Any, Row],
    centres: Sequence[float],
    divisor: int,
    unit: str,
    bar: float,
) -> None:
    shown = [
        (centre + 0.75, row_label(row), _measured_bytes(seen[_place(row)], name))
        for row, centre in zip(rows, centres, strict=True)
        if _place(row) in seen
    ]
    if not shown:
        return
    is_rest = name == "rest"
    label = "rest, measured" if is_rest else f"{words(name)}, measured"
    figure.add_bar(
        name=label,
        y=[at for at, _, _ in shown],
        x=[size / divisor for _, _, size in shown],
        width=bar,
        orientation="h",
        # The others have the colour of their prediction; a longer legend fills a phone.
        showlegend=is_rest,
        customdata=[[row, size_text(size, unit)] for _, row, size in shown],
        marker=measured_marker(OTHER_COLOUR if is_rest else component_colour(name)),
        hovertemplate=f"%{{customdata[0]}}<br><b>{label}</b>: %{{customdata[1]}}<extra></extra>",
    )


def _measured_bytes(row: Row, name: str) -> int:
    if name != "rest":
        return int(row[name])
    return int(row["allocated_bytes"] - row["parameters"] - row["optimizer"])


def _ideal(
    figure: go.Figure, rows: Sequence[Row], centres: Sequence[float], divisor: int, unit: str
) -> None:
    shown = [(r, y) for r, y in zip(rows, centres, strict=True) if r["ideal_bytes"] is not None]
    if not shown:
        return
    figure.add_scatter(
        name="ideal",
        x=[row["ideal_bytes"] / divisor for row, _ in shown],
        y=[y for _, y in shown],
        mode="markers",
        marker={
            "symbol": "line-ns",
            "size": BAR_PX + 7,
            "line": {"color": IDEAL_COLOUR, "width": 2.5},
        },
        customdata=[
            [
                row_label(row),
                size_text(row["ideal_bytes"], unit),
                f"{row['distance_percent']:+z.2f}",
            ]
            for row, _ in shown
        ],
        hovertemplate="%{customdata[0]}<br>ideal %{customdata[1]}; predicted is "
        "%{customdata[2]} % above<extra></extra>",
    )


def sends_figure(rows: Sequence[Row], unit: str) -> go.Figure:
    """Return the predicted time of each row's collectives in a step, stacked, in ms."""
    shown = [row for row in rows if any(one["sent_bytes"] for one in row["sent"])]
    figure = base_figure(MARGIN_PX + len(shown) * (BAR_PX + GAP_PX), barmode="stack")
    labels = [row_label(row) for row in shown]
    kinds = dict.fromkeys(one["collective"] for row in shown for one in row["sent"])
    for kind in kinds:
        found = [next((o for o in r["sent"] if o["collective"] == kind), None) for r in shown]
        name = kind.replace("_", "-")
        figure.add_bar(
            name=name,
            y=labels,
            x=[one["time_s"] * 1e3 if one else 0 for one in found],
            orientation="h",
            customdata=[
                [size_text(one["sent_bytes"], unit), one["calls"]] if one else ["", 0]
                for one in found
            ],
            marker=predicted_marker(COLLECTIVE_COLOURS.get(kind, OTHER_COLOUR)),
            hovertemplate=f"%{{y}}<br><b>{name}</b>: %{{x:.3g}} ms, %{{customdata[0]}} in "
            "%{customdata[1]} calls<extra></extra>",
        )
    figure.update_xaxes(title="ms per step, nothing overlapped", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=labels)
    return figure
