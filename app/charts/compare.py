"""The waterfall between two predicted plans: which part moved, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import plotly.graph_objects as go

from app.charts.style import (
    MEASURED_COLOUR,
    PREDICTED_COLOUR,
    VERDICT_COLOURS,
    base_figure,
    predicted_marker,
)
from planner.difference import Waterfall, signed

ROW_PX, MARGIN_PX = 30, 92
MORE_COLOUR, LESS_COLOUR = VERDICT_COLOURS["does_not_fit"], MEASURED_COLOUR
# Of the axis, room for the text beside the longest bar.
TEXT_ROOM = 1.28
# Label, where the bar begins, how far it goes, its text.
Bar = tuple[str, float, float, str]


def waterfall_figure(
    fall: Waterfall,
    names: tuple[str, str],
    divisor: float,
    unit_name: str,
    show: Callable[[float], str],
) -> go.Figure:
    """Return bars from the baseline's total, part by part, to the chosen plan's total.

    Values are divided by `divisor` for an axis in `unit_name`; `show` writes them in full.
    """
    bars = _bars(fall, names, show)
    figure = base_figure(MARGIN_PX + ROW_PX * len(bars), showlegend=False)
    changes = bars[1:-1]
    _add(figure, [bars[0], bars[-1]], PREDICTED_COLOUR, divisor)
    _add(figure, [bar for bar in changes if bar[2] > 0], MORE_COLOUR, divisor)
    _add(figure, [bar for bar in changes if bar[2] < 0], LESS_COLOUR, divisor)
    ends = [max(start, start + size) / divisor for _, start, size, _ in bars]
    labels = [label for label, *_ in bars]
    figure.add_scatter(
        x=ends,
        y=labels,
        mode="text",
        text=[f" {text}" for *_, text in bars],
        textposition="middle right",
        hoverinfo="skip",
        cliponaxis=False,
    )
    figure.update_xaxes(title=unit_name, range=[0, TEXT_ROOM * max(ends)])
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=labels)
    return figure


def _bars(fall: Waterfall, names: tuple[str, str], show: Callable[[float], str]) -> list[Bar]:
    levels = accumulate((change for _, change in fall.moves), initial=fall.start)
    return [
        (names[0], 0, fall.start, show(fall.start)),
        *(
            (name, level, change, signed(change, show))
            for (name, change), level in zip(fall.moves, levels, strict=False)
        ),
        (names[1], 0, fall.end, show(fall.end)),
    ]


def _add(figure: go.Figure, bars: Sequence[Bar], colour: str, divisor: float) -> None:
    if not bars:
        return
    figure.add_bar(
        y=[label for label, *_ in bars],
        x=[size / divisor for _, _, size, _ in bars],
        base=[start / divisor for _, start, _, _ in bars],
        orientation="h",
        customdata=[text for *_, text in bars],
        marker=predicted_marker(colour),
        hovertemplate="%{y}: <b>%{customdata}</b><extra></extra>",
    )
