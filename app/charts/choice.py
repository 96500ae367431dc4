"""Figures over many plans: ZeRO stage and world size, kernel and sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    COMPONENT_COLOURS,
    OTHER_COLOUR,
    VERDICT_COLOURS,
    axis_unit,
    base_figure,
    size_text,
)

HEAT_MAP_HEIGHT_PX = 270
CURVE_HEIGHT_PX = 340
VERDICT_LEVELS: Mapping[str, int] = {"fits": 0, "tight": 1, "does_not_fit": 2}
VERDICT_MARKS: Mapping[str, str] = {"fits": "", "tight": "<br>~", "does_not_fit": "<br>✗"}
FRAME_COLOUR = "#58B0FF"
VERDICT_WORDS: Mapping[str, str] = {
    "fits": "fits",
    "tight": "tight",
    "does_not_fit": "does not fit",
}
# Colour, dash and marker of each kernel: sdpa and triton often lie on one another.
ATTENTION_STYLES: Mapping[str, tuple[str, str, str]] = {
    "eager": (COMPONENT_COLOURS["attention"], "dash", "circle-open"),
    "sdpa": (COMPONENT_COLOURS["gathered"], "dash", "square-open"),
    "triton": (COMPONENT_COLOURS["optimizer"], "dot", "x-thin-open"),
}


def heat_map_figure(
    cells: Sequence[Mapping[str, Any]], current: tuple[int, int], unit: str
) -> go.Figure:
    """Return device memory of every ZeRO stage (rows) at every world size (columns).

    `cells` hold `zero_stage`, `world_size`, `device_bytes` and `verdict`;
    `current` is the plan's own (stage, world size), drawn with a frame.
    """
    stages = sorted({cell["zero_stage"] for cell in cells})
    worlds = sorted({cell["world_size"] for cell in cells})
    by_place = {(cell["zero_stage"], cell["world_size"]): cell for cell in cells}
    rows = [[by_place[stage, world] for world in worlds] for stage in stages]
    divisor, unit_name = axis_unit(max(cell["device_bytes"] for cell in cells), unit)
    figure = base_figure(HEAT_MAP_HEIGHT_PX)
    figure.add_heatmap(
        z=[[VERDICT_LEVELS[cell["verdict"]] for cell in row] for row in rows],
        x=[str(world) for world in worlds],
        y=[f"ZeRO {stage}" for stage in stages],
        text=[[_cell_text(cell, divisor) for cell in row] for row in rows],
        customdata=[[_cell_hover(cell, unit) for cell in row] for row in rows],
        texttemplate="%{text}",
        textfont={"color": "#FFFFFF", "size": 11},
        hovertemplate="ZeRO %{y} on %{x} GPUs: %{customdata}<extra></extra>",
        colorscale=_verdict_scale(),
        zmin=0,
        zmax=2,
        showscale=False,
        xgap=2,
        ygap=2,
    )
    _frame_current(figure, stages, worlds, current)
    figure.update_xaxes(title="GPUs (data-parallel world size)", type="category", showgrid=False)
    figure.update_yaxes(showgrid=False)
    figure.update_layout(title={"text": unit_name + " per GPU", "font": {"size": 12}, "x": 0})
    return figure


def _cell_text(cell: Mapping[str, Any], divisor: int) -> str:
    value = cell["device_bytes"] / divisor
    digits = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    return digits + VERDICT_MARKS[cell["verdict"]]


def _cell_hover(cell: Mapping[str, Any], unit: str) -> str:
    return f"{size_text(cell['device_bytes'], unit)}, {VERDICT_WORDS[cell['verdict']]}"


def _verdict_scale() -> list[list[Any]]:
    """Three flat steps of colour for fits, tight and does not fit."""
    colours = [VERDICT_COLOURS[state] for state in VERDICT_LEVELS]
    edges = [(0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1)]
    return [[edge, colour] for colour, pair in zip(colours, edges, strict=True) for edge in pair]


def _frame_current(
    figure: go.Figure, stages: list[int], worlds: list[int], current: tuple[int, int]
) -> None:
    stage, world = current
    if stage not in stages or world not in worlds:
        return
    row, column = stages.index(stage), worlds.index(world)
    figure.add_shape(
        type="rect",
        x0=column - 0.5,
        x1=column + 0.5,
        y0=row - 0.5,
        y1=row + 0.5,
        line={"width": 4, "color": FRAME_COLOUR},
    )


def attention_figure(
    curves: Mapping[str, Sequence[Mapping[str, int]]],
    capacity_bytes: int,
    sequence_length: int,
    unit: str,
) -> go.Figure:
    """Return device memory at the peak against sequence length, a line per attention kernel.

    A point of a curve holds `sequence_length`, `device_bytes` and `scores_bytes`, the part that
    stored score matrices take.
    """
    divisor, unit_name = axis_unit(capacity_bytes, unit)
    figure = base_figure(CURVE_HEIGHT_PX)
    for kernel, points in curves.items():
        figure.add_scatter(**_curve(points, divisor, unit), name=kernel, **_hollow_line(kernel))
    figure.add_scatter(**_capacity_trace(curves, capacity_bytes / divisor))
    figure.add_vline(x=sequence_length, line_dash="dot", line_width=1, line_color=OTHER_COLOUR)
    figure.update_xaxes(title="sequence length (tokens)", type="log", **_power_ticks(curves))
    figure.update_yaxes(title=f"{unit_name} per GPU", type="log", dtick=1, tickformat=",")
    return figure


def _curve(points: Sequence[Mapping[str, int]], divisor: int, unit: str) -> dict[str, Any]:
    hovers = [
        f"{size_text(point['device_bytes'], unit)} per GPU"
        f"<br>stored scores {size_text(point['scores_bytes'], unit)}"
        for point in points
    ]
    return {
        "x": [point["sequence_length"] for point in points],
        "y": [point["device_bytes"] / divisor for point in points],
        "customdata": hovers,
        "hovertemplate": "%{x:,} tokens<br>%{customdata}<extra>%{fullData.name}</extra>",
    }


def _capacity_trace(
    curves: Mapping[str, Sequence[Mapping[str, int]]], capacity: float
) -> dict[str, Any]:
    """The capacity as a trace: an annotation on a logarithmic axis would stand at 10^y."""
    lengths = [point["sequence_length"] for points in curves.values() for point in points]
    return {
        "name": "memory of one GPU",
        "x": [min(lengths), max(lengths)],
        "y": [capacity, capacity],
        "mode": "lines",
        "line": {"color": VERDICT_COLOURS["does_not_fit"], "dash": "dot", "width": 2},
        "hoverinfo": "skip",
    }


def _hollow_line(kernel: str) -> dict[str, Any]:
    colour, dash, symbol = ATTENTION_STYLES[kernel]
    return {
        "mode": "lines+markers",
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"symbol": symbol, "size": 8, "color": colour, "line": {"width": 1.5}},
    }


def _power_ticks(curves: Mapping[str, Sequence[Mapping[str, int]]]) -> dict[str, Any]:
    lengths = sorted({p["sequence_length"] for points in curves.values() for p in points})
    powers = [length for length in lengths if length & (length - 1) == 0]
    return {"tickvals": powers, "ticktext": [_short(power) for power in powers]}


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)
