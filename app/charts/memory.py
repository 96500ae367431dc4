"""Figures of one predicted plan: what fills the GPU, and when."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    add_capacity_line,
    axis_unit,
    base_figure,
    component_colour,
    predicted_marker,
    size_text,
    words,
    wrapped,
)

BREAKDOWN_HEIGHT_PX = 210
PHASES_HEIGHT_PX = 360
TICK_COLUMNS = 16
PEAK_ROOM = 1.12


def breakdown_figure(
    parts: Sequence[Mapping[str, Any]], capacity_bytes: int, unit: str
) -> go.Figure:
    """Return the parts of the peak stacked in one bar, with the GPU's capacity as a line.

    `parts` are dictionaries of `name`, `bytes` and `formula`; their sum is the device total.
    """
    total_bytes = sum(part["bytes"] for part in parts)
    divisor, unit_name = axis_unit(max(total_bytes, capacity_bytes), unit)
    figure = base_figure(BREAKDOWN_HEIGHT_PX, barmode="stack")
    for part in parts:
        if part["bytes"]:
            figure.add_bar(**_stacked_part(part, divisor, unit))
    capacity_text = f"capacity {size_text(capacity_bytes, unit)}"
    reach = 1.04 * max(total_bytes, capacity_bytes) / divisor
    add_capacity_line(figure, capacity_bytes / divisor, capacity_text, reach)
    figure.update_xaxes(title=f"{unit_name} on the worst GPU", range=[0, reach])
    figure.update_yaxes(showticklabels=False)
    return figure


def _stacked_part(part: Mapping[str, Any], divisor: int, unit: str) -> dict[str, Any]:
    hover = f"<b>{words(part['name'])}</b>: {size_text(part['bytes'], unit)}"
    return {
        "name": words(part["name"]),
        "x": [part["bytes"] / divisor],
        "y": ["predicted"],
        "orientation": "h",
        "marker": predicted_marker(component_colour(part["name"])),
        "hovertemplate": f"{hover}<br>{wrapped(part['formula'])}<extra></extra>",
    }


def phases_figure(memory: Mapping[str, Any], unit: str) -> go.Figure:
    """Return allocated bytes of every phase, a bar each, by component; the peak is marked."""
    phases = memory["phases"]
    largest_bytes = max((phase["allocated_bytes"] for phase in phases), default=0)
    divisor, unit_name = axis_unit(largest_bytes, unit)
    labels = [_tick(phase) for phase in phases]
    figure = base_figure(PHASES_HEIGHT_PX, barmode="stack")
    for component in _component_names(phases):
        values = [phase["parts"].get(component, 0) for phase in phases]
        figure.add_bar(
            name=words(component),
            y=labels,
            x=[value / divisor for value in values],
            orientation="h",
            customdata=[size_text(value, unit) for value in values],
            marker=predicted_marker(component_colour(component)),
            hovertemplate=f"<b>{words(component)}</b>: %{{customdata}}<br>%{{y}}<extra></extra>",
        )
    _mark_peak(figure, memory, divisor)
    reach = PEAK_ROOM * largest_bytes / divisor
    figure.update_xaxes(title=f"{unit_name} allocated", range=[0, reach])
    figure.update_yaxes(autorange="reversed")
    return figure


def _tick(phase: Mapping[str, Any]) -> str:
    """The phase's label in short lines, which leave room for the bars on a phone too."""
    return "<br>".join(textwrap.wrap(phase["label"], TICK_COLUMNS))


def _component_names(phases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of all components, in the order in which they first appear."""
    names: dict[str, None] = {}
    for phase in phases:
        names.update(dict.fromkeys(phase["parts"]))
    return list(names)


def _mark_peak(figure: go.Figure, memory: Mapping[str, Any], divisor: int) -> None:
    for phase in memory["phases"]:
        if phase["name"] == memory["peak_phase"]:
            figure.add_annotation(
                x=phase["allocated_bytes"] / divisor,
                y=_tick(phase),
                text="peak",
                showarrow=False,
                xanchor="left",
            )
