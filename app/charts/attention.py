"""Figures of the Attention page: variants side by side, over the sequence, under the roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log10
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    OTHER_COLOUR,
    VERDICT_COLOURS,
    axis_unit,
    base_figure,
    measured_marker,
    predicted_marker,
    size_text,
    translucent,
)
from planner.attention.answer import WORDS
from planner.attention.problem import EXACT_VARIANTS, Variant
from planner.units import format_rate, format_seconds, format_share

BAR, ROW, GROUP_GAP = 0.36, 1.0, 0.9
ROW_PX, MARGIN_PX, CURVE_PX, ROOFLINE_PX = 38, 120, 380, 430
# A logarithmic axis begins below the smallest bar and leaves room for the figure behind the largest.
LEFT_ROOM, RIGHT_ROOM = 2.5, 30.0
RECORDED_SYMBOL, MEASURED_SYMBOL = "circle", "square"
VARIANT_COLOURS: Mapping[str, str] = {
    "eager": "#D64C80",
    "sdpa": "#159FB2",
    "triton": "#3B7BDB",
    "window": "#D58512",
    "global_local": "#A58A2C",
    "block_sparse": "#34A05C",
    "linear": "#8663DA",
}
Row = Mapping[str, Any]
Show = Callable[[float], str]


def is_kernel(variant: str) -> bool:
    """Whether a variant is an exact kernel; the others are algorithms."""
    return variant in set(EXACT_VARIANTS)


def name_of(variant: str) -> str:
    """Return a variant's name as people read it."""
    return WORDS[Variant(variant)]


def bars_figure(rows: Sequence[Row], show: Show, axis: str) -> go.Figure:
    """Return a hatched bar of each variant's prediction, and what was measured below it.

    `rows` hold `variant`, `predicted`, and `measured` with `here` where it was measured. Measured
    here is a filled bar, recorded elsewhere a dot. Kernels stand above, algorithms below a line.
    """
    places = _places(rows)
    figure = base_figure(MARGIN_PX + ROW_PX * (len(rows) + 1), showlegend=True)
    for row, at in zip(rows, places, strict=True):
        _predicted_bar(figure, row, at, show)
        if row.get("measured") is not None:
            _measured_bar(figure, row, at, show)
    _legend(figure, rows)
    _group_lines(figure, rows, places)
    values = [v for row in rows for v in (row["predicted"], row.get("measured")) if v]
    # Every bar says its value; ticks of a logarithmic axis say little more.
    figure.update_xaxes(
        type="log", title=axis, range=_log_range(values), showticklabels=False, showgrid=False
    )
    figure.update_yaxes(
        tickvals=places,
        ticktext=[name_of(row["variant"]) for row in rows],
        range=[(places[-1] if places else 0) + 0.9, -0.9],
        showgrid=False,
        zeroline=False,
    )
    return figure


def _places(rows: Sequence[Row]) -> list[float]:
    places, at = [], 0.0
    for index, row in enumerate(rows):
        if index and is_kernel(rows[index - 1]["variant"]) and not is_kernel(row["variant"]):
            at += GROUP_GAP
        places.append(at)
        at += ROW
    return places


def _log_range(values: Sequence[float]) -> list[float]:
    if not values:
        return [0, 1]
    return [log10(min(values) / LEFT_ROOM), log10(max(values) * RIGHT_ROOM)]


def _predicted_bar(figure: go.Figure, row: Row, at: float, show: Show) -> None:
    has_measured = row.get("measured") is not None
    figure.add_bar(
        x=[row["predicted"]],
        y=[at - (BAR / 2 if has_measured else 0)],
        width=BAR if has_measured else 2 * BAR,
        orientation="h",
        marker=predicted_marker(VARIANT_COLOURS[row["variant"]]),
        text=[show(row["predicted"])],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        hovertemplate=f"<b>{name_of(row['variant'])}</b>, predicted: {show(row['predicted'])}"
        "<extra></extra>",
    )


def _measured_bar(figure: go.Figure, row: Row, at: float, show: Show) -> None:
    text, colour = show(row["measured"]), VARIANT_COLOURS[row["variant"]]
    hover = f"<b>{name_of(row['variant'])}</b>, {row['place']}: {text}<extra></extra>"
    common: dict[str, Any] = {"x": [row["measured"]], "showlegend": False, "hovertemplate": hover}
    if row["here"]:
        figure.add_bar(
            y=[at + BAR / 2],
            width=BAR,
            orientation="h",
            marker=measured_marker(colour),
            text=[text],
            textposition="outside",
            cliponaxis=False,
            **common,
        )
        return
    figure.add_scatter(
        y=[at + BAR / 2],
        mode="markers+text",
        marker={"symbol": RECORDED_SYMBOL, "size": 10, "color": colour},
        text=[f"  {text}"],
        textposition="middle right",
        cliponaxis=False,
        **common,
    )


def _legend(figure: go.Figure, rows: Sequence[Row]) -> None:
    """Say what hatched, filled and dotted mean, each where it is there."""
    figure.add_bar(
        name="predicted", x=[None], y=[None], marker=predicted_marker(OTHER_COLOUR), orientation="h"
    )
    measured = [row for row in rows if row.get("measured") is not None]
    if any(row["here"] for row in measured):
        figure.add_bar(
            name="measured here",
            x=[None],
            y=[None],
            marker=measured_marker(OTHER_COLOUR),
            orientation="h",
        )
    if any(not row["here"] for row in measured):
        figure.add_scatter(
            name="recorded elsewhere",
            x=[None],
            y=[None],
            mode="markers",
            marker={"symbol": RECORDED_SYMBOL, "size": 10, "color": OTHER_COLOUR},
        )


def _group_lines(figure: go.Figure, rows: Sequence[Row], places: Sequence[float]) -> None:
    """Draw a line between kernels and algorithms, with what each group is."""
    kinds = [is_kernel(row["variant"]) for row in rows]
    if True not in kinds or False not in kinds:
        return
    first = kinds.index(False)
    between = (places[first - 1] + places[first]) / 2
    figure.add_hline(y=between, line_width=1, line_dash="dot", line_color=OTHER_COLOUR)
    for shift, anchor, text in (
        (-0.02, "bottom", "↑ kernels: exact"),
        (0.02, "top", "↓ algorithms: another result"),
    ):
        figure.add_annotation(
            x=1,
            xref="paper",
            xanchor="right",
            y=between + shift,
            yanchor=anchor,
            text=text,
            showarrow=False,
            font={"size": 11, "color": OTHER_COLOUR},
        )


def memory_curves_figure(
    curves: Mapping[str, Sequence[Row]],
    measured: Sequence[Row],
    longest: int | None,
    capacity_bytes: int,
    unit: str,
) -> go.Figure:
    """Return device bytes over the sequence with the GPU's capacity and where eager stops fitting.

    `measured` hold variant, sequence_length, device_bytes, here and outcome.
    """
    divisor, name = axis_unit(capacity_bytes, unit)
    figure = base_figure(CURVE_PX)
    for variant, points in curves.items():
        _curve(figure, variant, points, "device_bytes", divisor, lambda v: size_text(v, unit))
    for row in measured:
        _measured_point(
            figure, row, row["device_bytes"] / divisor, size_text(row["device_bytes"], unit)
        )
    _capacity_line(figure, curves, capacity_bytes / divisor, size_text(capacity_bytes, unit))
    if longest and "eager" in curves:
        _mark_end(figure, longest, capacity_bytes / divisor)
    figure.update_yaxes(type="log", title=f"{name} on the GPU", dtick=1, exponentformat="none")
    _length_axis(figure, curves)
    return figure


def _capacity_line(
    figure: go.Figure, curves: Mapping[str, Sequence[Row]], height: float, text: str
) -> None:
    lengths = [point["sequence_length"] for points in curves.values() for point in points]
    if not lengths:
        return
    figure.add_scatter(
        name=f"capacity {text}",
        x=[min(lengths), max(lengths)],
        y=[height, height],
        mode="lines",
        line={"color": VERDICT_COLOURS["does_not_fit"], "dash": "dash", "width": 2},
        hovertemplate=f"capacity {text}<extra></extra>",
    )


def _mark_end(figure: go.Figure, longest: int, height: float) -> None:
    figure.add_scatter(
        name="eager out of memory",
        x=[longest],
        y=[height],
        mode="markers",
        marker={
            "symbol": "x",
            "size": 13,
            "color": VERDICT_COLOURS["does_not_fit"],
            "line": {"width": 1, "color": "#FFFFFF"},
        },
        hovertemplate=f"eager fits up to {longest:,} tokens<extra></extra>",
    )


def time_curves_figure(
    curves: Mapping[str, Sequence[Row]], measured: Sequence[Row], direction: str
) -> go.Figure:
    """Return the time of one direction over the sequence; a line ends where memory ends.

    `measured` hold variant, sequence_length, time_s and here; an out-of-memory row has no time.
    """
    figure = base_figure(CURVE_PX)
    for variant, points in curves.items():
        fitting = [point for point in points if point["fits"]]
        _curve(figure, variant, fitting, f"{direction}_s", 1e-3, format_seconds)
        if fitting and len(fitting) < len(points):
            last = fitting[-1]
            figure.add_scatter(
                x=[last["sequence_length"]],
                y=[last[f"{direction}_s"] * 1e3],
                mode="markers",
                showlegend=False,
                marker={"symbol": "x", "size": 12, "color": VERDICT_COLOURS["does_not_fit"]},
                hovertemplate=f"{name_of(variant)}: out of memory beyond<extra></extra>",
            )
    for row in measured:
        _measured_point(figure, row, row["time_s"] * 1e3, format_seconds(row["time_s"]))
    figure.update_yaxes(type="log", title=f"{direction}, ms", dtick=1, exponentformat="none")
    _length_axis(figure, curves)
    return figure


def _curve(
    figure: go.Figure, variant: str, points: Sequence[Row], key: str, divisor: float, show: Show
) -> None:
    figure.add_scatter(
        name=name_of(variant),
        x=[point["sequence_length"] for point in points],
        y=[point[key] / divisor for point in points],
        mode="lines+markers",
        line={
            "color": VARIANT_COLOURS[variant],
            "dash": "solid" if is_kernel(variant) else "dash",
            "width": 2,
        },
        marker={"symbol": "circle-open", "size": 6},
        customdata=[show(point[key]) for point in points],
        hovertemplate=f"{name_of(variant)}, %{{x:,}} tokens: %{{customdata}}<extra></extra>",
    )


def _measured_point(figure: go.Figure, row: Row, y: float, text: str) -> None:
    is_out = str(row.get("outcome", "done")).startswith("oom")
    place = "measured here" if row["here"] else "recorded elsewhere"
    symbol = "x" if is_out else MEASURED_SYMBOL if row["here"] else RECORDED_SYMBOL
    word = "out of memory, " if is_out else ""
    figure.add_scatter(
        x=[row["sequence_length"]],
        y=[y],
        mode="markers",
        showlegend=False,
        marker={"symbol": symbol, "size": 10, "color": VARIANT_COLOURS[row["variant"]]},
        hovertemplate=f"{name_of(row['variant'])}, {word}{place}: {text}<extra></extra>",
    )


def _length_axis(figure: go.Figure, curves: Mapping[str, Sequence[Row]]) -> None:
    lengths = sorted({point["sequence_length"] for points in curves.values() for point in points})
    ticks = [length for length in lengths if length & (length - 1) == 0][::2]
    texts = [f"{length // 1024}k" if length >= 1024 else str(length) for length in ticks]
    figure.update_xaxes(type="log", title="tokens", tickvals=ticks, ticktext=texts)


def roofline_figure(
    points: Sequence[Row], roofs: Sequence[Row], intensities: tuple[float, float]
) -> go.Figure:
    """Return FLOP/s over FLOPs per HBM byte, under the roofs of the vendor and of the card.

    `points` hold variant, intensity, predicted_flop_s, and measured_flop_s with here and place;
    `roofs` hold name, flop_s, bytes_s and measured. The axis spans `intensities`.
    """
    figure = base_figure(ROOFLINE_PX)
    for roof in roofs:
        _roof(figure, roof, intensities)
    for point in points:
        _roofline_point(figure, point)
    figure.update_xaxes(
        type="log", title="FLOPs per byte of HBM traffic", dtick=1, exponentformat="none"
    )
    figure.update_yaxes(type="log", title="TFLOP/s", dtick=1, exponentformat="none")
    return figure


def _roof(figure: go.Figure, roof: Row, intensities: tuple[float, float]) -> None:
    low, high = intensities
    knee = roof["flop_s"] / roof["bytes_s"]
    x = sorted({low, min(max(knee, low), high), high})
    rates = f"{format_rate(roof['flop_s'], 'FLOP')}, {format_rate(roof['bytes_s'], 'B')}"
    figure.add_scatter(
        name=roof["name"],
        x=x,
        y=[min(roof["flop_s"], value * roof["bytes_s"]) / 1e12 for value in x],
        mode="lines",
        line={
            "color": OTHER_COLOUR,
            "dash": "solid" if roof["measured"] else "dash",
            "width": 2,
        },
        hovertemplate=f"{roof['name']}: {rates}<extra></extra>",
    )


def _roofline_point(figure: go.Figure, point: Row) -> None:
    colour, name = VARIANT_COLOURS[point["variant"]], name_of(point["variant"])
    figure.add_scatter(
        name=name,
        x=[point["intensity"]],
        y=[point["predicted_flop_s"] / 1e12],
        mode="markers",
        marker={
            "symbol": "square-open" if is_kernel(point["variant"]) else "diamond-open",
            "size": 12,
            "color": colour,
            "line": {"width": 2, "color": colour},
        },
        hovertemplate=f"{name}, predicted: {format_rate(point['predicted_flop_s'], 'FLOP')}"
        "<extra></extra>",
    )
    if point.get("measured_flop_s") is None:
        return
    figure.add_scatter(
        x=[point["intensity"]],
        y=[point["measured_flop_s"] / 1e12],
        mode="markers",
        showlegend=False,
        marker={
            "symbol": MEASURED_SYMBOL if point["here"] else RECORDED_SYMBOL,
            "size": 11,
            "color": colour,
        },
        hovertemplate=f"{name}, {point['place']}: "
        f"{format_rate(point['measured_flop_s'], 'FLOP')}<extra></extra>",
    )


def distance_figure(rows: Sequence[Row]) -> go.Figure:
    """Return how far each algorithm's output is from exact attention's, as a share of its norm.

    `rows` hold variant, distance, here and place.
    """
    figure = base_figure(MARGIN_PX + ROW_PX * len(rows), showlegend=False)
    for row in rows:
        colour = VARIANT_COLOURS[row["variant"]]
        figure.add_bar(
            x=[row["distance"]],
            y=[name_of(row["variant"])],
            orientation="h",
            width=2 * BAR,
            marker=measured_marker(colour if row["here"] else translucent(colour, 0.7)),
            text=[format_share(row["distance"])],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"%{{y}}, {row['place']}: %{{x:.2%}}<extra></extra>",
        )
    figure.update_xaxes(
        title="distance from exact attention, % of its norm",
        tickformat=".0%",
        range=[0, 1.2 * max(row["distance"] for row in rows)],
    )
    figure.update_yaxes(autorange="reversed")
    return figure
