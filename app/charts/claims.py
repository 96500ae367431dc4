"""The figure of a claim: what is claimed as a band, what is computed and measured as marks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    MEASURED_COLOUR,
    PREDICTED_COLOUR,
    VERDICT_COLOURS,
    base_figure,
    translucent,
    wrapped,
)

ROW_PX, MARGIN_PX = 46, 110
LABEL_COLUMNS, LABEL_FONT_PX = 26, 11
# From this ratio of the largest to the smallest value on, an axis is logarithmic.
WIDE_RATIO = 20.0
BAND_COLOUR = VERDICT_COLOURS["fits"]
Row = Mapping[str, Any]
Show = Callable[[float], str]


def claim_figure(claim: Row, show: Show) -> go.Figure:
    """Return a claim's values, one a line: hollow computed, filled measured here, dots recorded.

    The green band is what agrees with the claim. `show` writes a value.
    """
    marks = [*claim["computed"], *claim["measured"]]
    figure = base_figure(MARGIN_PX + ROW_PX * len(marks), showlegend=True)
    ends = [end for end in (claim["claimed"]["low"], claim["claimed"]["high"]) if end is not None]
    is_log = _is_wide([*ends, *(one["value"] for one in marks)])
    span = _span([*ends, *(one["value"] for one in marks)], is_log)
    _band(figure, claim["claimed"], span, is_log)
    for place, one in enumerate(marks):
        _mark(figure, one, place, show, is_right=_is_right(one["value"], span, is_log))
    _legend(figure, claim)
    figure.update_xaxes(
        type="log" if is_log else "linear",
        range=span,
        showticklabels=False,
        showgrid=False,
        zeroline=False,
        title=f"{claim['unit']}{', logarithmic' if is_log else ''}",
    )
    figure.update_yaxes(
        tickvals=list(range(len(marks))),
        ticktext=[_label(one["condition"]) for one in marks],
        tickfont_size=LABEL_FONT_PX,
        range=[len(marks) - 0.4, -0.6],
        zeroline=False,
    )
    return figure


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > WIDE_RATIO


def _span(values: Sequence[float], is_log: bool) -> list[float]:
    """Return the axis' range with room for what stands beside the marks."""
    low, high = min(values), max(values)
    if is_log:
        low, high = log10(low), log10(high)
    room = (high - low) or abs(high) or 1.0
    return [low - 0.12 * room, high + 0.35 * room]


def _is_right(value: float, span: Sequence[float], is_log: bool) -> bool:
    at = log10(value) if is_log else value
    return at > (span[0] + span[1]) / 2


def _band(figure: go.Figure, claimed: Row, span: Sequence[float], is_log: bool) -> None:
    ends = [10**end for end in span] if is_log else list(span)
    low = ends[0] if claimed["low"] is None else claimed["low"]
    high = ends[1] if claimed["high"] is None else claimed["high"]
    if low == high:
        figure.add_vline(x=low, line_color=BAND_COLOUR, line_width=3, layer="below")
        return
    figure.add_vrect(
        x0=low, x1=high, fillcolor=translucent(BAND_COLOUR, 0.2), line_width=0, layer="below"
    )


def _mark(figure: go.Figure, one: Row, place: int, show: Show, *, is_right: bool) -> None:
    is_measured = "rows" in one
    source = ", ".join(one["rows"]) if is_measured else one["how"]
    figure.add_scatter(
        x=[one["value"]],
        y=[place],
        mode="markers+text",
        marker=_marker(one, is_measured),
        text=[f" {show(one['value'])} "],
        textposition="middle left" if is_right else "middle right",
        cliponaxis=False,
        showlegend=False,
        hovertemplate=f"<b>{wrapped(one['condition'])}</b><br>{show(one['value'])}<br>"
        f"{wrapped(source)}<extra></extra>",
    )


def _marker(one: Row, is_measured: bool) -> dict[str, Any]:
    if not is_measured:
        symbol = "diamond-open" if one["own_plan"] else "square-open"
        return {"symbol": symbol, "size": 12, "color": PREDICTED_COLOUR, "line": {"width": 2}}
    symbol = "square" if one["here"] else "circle"
    return {"symbol": symbol, "size": 11, "color": MEASURED_COLOUR}


def _legend(figure: go.Figure, claim: Row) -> None:
    """Add one entry for each kind of mark that is drawn."""
    shown: dict[str, dict[str, Any]] = {}
    for one in claim["computed"]:
        shown["your plan, computed" if one["own_plan"] else "computed"] = _marker(one, False)
    for one in claim["measured"]:
        shown["measured here" if one["here"] else "recorded"] = _marker(one, True)
    shown["claimed"] = {"symbol": "square", "size": 12, "color": translucent(BAND_COLOUR, 0.4)}
    for name, marker in shown.items():
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)


def _label(text: str) -> str:
    """Break a condition into lines that leave room for the marks on a phone."""
    return "<br>".join(textwrap.wrap(text, LABEL_COLUMNS))
