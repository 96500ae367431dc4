"""The figure of a proven limit: short runs on the curve of predicted device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    MEASURED_COLOUR,
    PREDICTED_COLOUR,
    VERDICT_COLOURS,
    axis_unit,
    base_figure,
    size_text,
)
from planner.workload import field_words

HEIGHT_PX = 320
MAX_UNIT_TICKS = 12
Row = Mapping[str, Any]


def limit_figure(found: Row, capacity_bytes: int, unit: str) -> go.Figure:
    """Return device bytes over the value tried: hollow predicted, filled measured, crosses out of memory.

    A run out of memory measured no peak: its cross stands at what was predicted.
    """
    planned = sorted(
        (one for one in found["trials"] if one["predicted_bytes"]), key=lambda one: one["value"]
    )
    divisor, unit_name = axis_unit(capacity_bytes, unit)
    figure = base_figure(HEIGHT_PX)
    ran = [one for one in planned if one["device_bytes"]]
    refused = [one for one in planned if one["outcome"] == "oom_device"]
    _points(figure, planned, "predicted", "predicted_bytes", (divisor, unit))
    _points(figure, ran, "measured", "device_bytes", (divisor, unit))
    _points(figure, refused, "out of memory", "predicted_bytes", (divisor, unit))
    figure.add_hline(
        y=capacity_bytes / divisor,
        line_dash="dash",
        line_color=VERDICT_COLOURS["does_not_fit"],
        annotation_text=f"capacity {size_text(capacity_bytes, unit)}",
        annotation_position="top left",
    )
    figure.update_xaxes(title=field_words(found["name"]), tickformat=",d")
    tried = [one["value"] for one in planned]
    if tried and tried[-1] - tried[0] <= MAX_UNIT_TICKS:
        figure.update_xaxes(
            dtick=1
        )  # ticks at halves would be written as whole numbers, twice each
    figure.update_yaxes(title=f"{unit_name}, worst GPU")
    return figure


_MARKS: Mapping[str, Mapping[str, Any]] = {
    "predicted": {"color": PREDICTED_COLOUR, "symbol": "circle-open", "size": 11},
    "measured": {"color": MEASURED_COLOUR, "symbol": "circle", "size": 8},
    "out of memory": {"color": VERDICT_COLOURS["does_not_fit"], "symbol": "x", "size": 9},
}


def _points(
    figure: go.Figure, rows: Sequence[Row], name: str, field: str, scale: tuple[int, str]
) -> None:
    divisor, unit = scale
    figure.add_scatter(
        name=name,
        x=[one["value"] for one in rows],
        y=[one[field] / divisor for one in rows],
        mode="lines+markers" if name == "predicted" else "markers",
        line={"dash": "dot", "width": 1.5},
        marker=dict(_MARKS[name]),
        customdata=[size_text(one[field], unit) for one in rows],
        hovertemplate=f"<b>{name}</b> at %{{x:,}}: %{{customdata}}<extra></extra>",
    )
