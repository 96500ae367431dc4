"""Repeats of every spec of an experiment: a dot per run, the median and the range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import MEASURED_COLOUR, OTHER_COLOUR, base_figure, translucent

ROW_PX, MARGIN_PX = 40, 110
SYMBOLS: Mapping[bool, str] = {True: "square", False: "circle"}


def repeats_figure(points: Sequence[Mapping[str, Any]], axis_title: str) -> go.Figure:
    """Return a strip per group with a dot per run, its range as a bar and its median as a tick.

    `points` hold `group` (label), `value` (in the axis' unit), `text`, `is_here` and `is_throttled`.
    """
    labels = list(dict.fromkeys(point["group"] for point in points))
    figure = base_figure(MARGIN_PX + ROW_PX * len(labels))
    values = {
        label: sorted(point["value"] for point in points if point["group"] == label)
        for label in labels
    }
    _ranges(figure, values)
    for is_here in (True, False):
        for is_throttled in (False, True):
            own = [
                p for p in points if p["is_here"] is is_here and p["is_throttled"] is is_throttled
            ]
            _dots(figure, own, is_here=is_here, is_throttled=is_throttled)
    figure.update_xaxes(title=axis_title)
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=labels)
    return figure


def _ranges(figure: go.Figure, values: Mapping[str, Sequence[float]]) -> None:
    figure.add_bar(
        name="min to max",
        y=list(values),
        x=[own[-1] - own[0] for own in values.values()],
        base=[own[0] for own in values.values()],
        orientation="h",
        width=0.5,
        marker={"color": translucent(MEASURED_COLOUR, 0.22), "line": {"width": 0}},
        hoverinfo="skip",
    )
    figure.add_scatter(
        name="median",
        y=list(values),
        x=[_median(own) for own in values.values()],
        mode="markers",
        marker={"symbol": "line-ns", "size": 22, "line": {"width": 2.5, "color": MEASURED_COLOUR}},
        hovertemplate="%{y}<br>median %{x:.4g}<extra></extra>",
    )


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _dots(
    figure: go.Figure, points: Sequence[Mapping[str, Any]], *, is_here: bool, is_throttled: bool
) -> None:
    if not points:
        return
    where = "measured here" if is_here else "recorded elsewhere"
    figure.add_scatter(
        name=f"{where}, clock lowered" if is_throttled else where,
        y=[point["group"] for point in points],
        x=[point["value"] for point in points],
        mode="markers",
        marker={
            "symbol": SYMBOLS[is_here],
            "size": 9,
            "color": OTHER_COLOUR if is_throttled else MEASURED_COLOUR,
        },
        customdata=[point["text"] for point in points],
        hovertemplate="%{customdata}<extra></extra>",
    )
