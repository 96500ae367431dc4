"""Figures of serving: capacity and speed by lever, latency by rate, requests over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts.style import (
    OTHER_COLOUR,
    PREDICTED_COLOUR,
    VERDICT_COLOURS,
    base_figure,
    component_colour,
    predicted_marker,
    translucent,
)
from planner.units import format_count, format_seconds, format_signed

CURVE_PX, TIMELINE_ROW_PX, MARGIN_PX, COURSE_PX = 360, 11, 130, 400
RECORDED_SYMBOL, MEASURED_SYMBOL = "circle", "square"
LINE_COLOURS = ("#3B7BDB", "#D58512", "#34A05C", "#8663DA", "#D64C80", "#159FB2")
WAITING_COLOUR = "#B8A48A"
PHASES: Mapping[str, str] = {
    "waits": WAITING_COLOUR,
    "prompt": component_colour("activations"),
    "tokens": PREDICTED_COLOUR,
}
Row = Mapping[str, Any]


def capacity_figure(curves: Mapping[str, Sequence[tuple[int, int]]], chosen: int) -> go.Figure:
    """Return how many requests fit over the tokens that each holds, a line per cache or split.

    `chosen` is the length of the plan's own requests.
    """
    figure = base_figure(CURVE_PX)
    for colour, (name, points) in zip(LINE_COLOURS, curves.items(), strict=False):
        figure.add_scatter(
            name=name,
            x=[context for context, most in points if most],
            y=[most for _, most in points if most],
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"symbol": "circle-open", "size": 6},
            hovertemplate=f"{name}, %{{x:,}} tokens each: <b>%{{y:,}} requests</b><extra></extra>",
        )
    figure.add_vline(x=chosen, line_dash="dot", line_width=1, line_color=OTHER_COLOUR)
    figure.update_yaxes(type="log", title="requests at once", dtick=1, exponentformat="none")
    length_axis(figure, [c for points in curves.values() for c, _ in points], "tokens of a request")
    return figure


def length_axis(figure: go.Figure, lengths: Sequence[int], title: str) -> None:
    """Make the x axis one of powers of two, with their short names."""
    ticks = sorted(set(lengths))
    step = 2 if len(ticks) > 6 else 1
    texts = [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks]
    figure.update_xaxes(type="log", title=title, tickvals=ticks[::step], ticktext=texts[::step])


def speed_figure(
    curves: Mapping[str, Sequence[tuple[int, float, bool]]], measured: Sequence[Row]
) -> go.Figure:
    """Return the time of a step over the batch, a line per length; it ends where memory ends.

    `measured` hold batch, decode_s, what (a curve's name), here and place.
    """
    figure = base_figure(CURVE_PX)
    colours = dict(zip(curves, LINE_COLOURS, strict=False))
    for name, points in curves.items():
        fitting = [point for point in points if point[2]]
        figure.add_scatter(
            name=name,
            x=[batch for batch, _, _ in fitting],
            y=[1e3 * step_s for _, step_s, _ in fitting],
            mode="lines+markers",
            line={"color": colours[name], "width": 2},
            marker={"symbol": "circle-open", "size": 6},
            customdata=[
                [format_seconds(step_s), format_count(batch / step_s)]
                for batch, step_s, _ in fitting
            ],
            hovertemplate=f"{name}, %{{x:,}} at once: <b>%{{customdata[0]}}</b> a step, "
            "%{customdata[1]} tokens/s<extra></extra>",
        )
        _end(figure, name, fitting, len(fitting) < len(points))
    for row in measured:
        _measured(figure, row, colours.get(row["what"], OTHER_COLOUR))
    figure.update_yaxes(type="log", title="ms for one token of each", exponentformat="none")
    length_axis(figure, [p[0] for points in curves.values() for p in points], "requests at once")
    return figure


def _end(
    figure: go.Figure, name: str, fitting: Sequence[tuple[int, float, bool]], is_short: bool
) -> None:
    if not is_short or not fitting:
        return
    batch, step_s, _ = fitting[-1]
    figure.add_scatter(
        x=[batch],
        y=[1e3 * step_s],
        mode="markers",
        showlegend=False,
        marker={"symbol": "x", "size": 11, "color": VERDICT_COLOURS["does_not_fit"]},
        hovertemplate=f"{name}: twice as many do not fit<extra></extra>",
    )


def _measured(figure: go.Figure, row: Row, colour: str) -> None:
    figure.add_scatter(
        x=[row["batch"]],
        y=[1e3 * row["decode_s"]],
        mode="markers",
        showlegend=False,
        marker={
            "symbol": MEASURED_SYMBOL if row["here"] else RECORDED_SYMBOL,
            "size": 10,
            "color": colour,
            "line": {"width": 1, "color": "#FFFFFF"},
        },
        hovertemplate=f"{row['place']}: {row['what']}, {row['batch']} at once, context "
        f"{row['context']:,}: <b>{format_seconds(row['decode_s'])}</b><extra></extra>",
    )


def levers_figure(rows: Sequence[Row], show: Callable[[float], str]) -> go.Figure:
    """Return each lever's factor on one figure as a hatched bar from 1; `kind` colours it.

    Rows hold name, kind, factor and value; those without a factor are left out.
    """
    shown = [row for row in rows if row["factor"]]
    figure = base_figure(MARGIN_PX + 24 * len(shown), barmode="overlay")
    for kind, colour in (("system", PREDICTED_COLOUR), ("model", component_colour("gradients"))):
        own = [row for row in shown if row["kind"] == kind]
        if not own:
            continue
        figure.add_bar(
            name=f"{kind} lever",
            y=[row["name"] for row in own],
            x=[row["factor"] - 1 for row in own],
            base=1,
            orientation="h",
            marker=predicted_marker(colour),
            customdata=[[show(row["value"]), f"× {row['factor']:.2f}"] for row in own],
            hovertemplate="%{y}: <b>%{customdata[0]}</b>, %{customdata[1]}<extra></extra>",
        )
    # Beside a bar that goes left the factor would lie on the lever's name.
    figure.add_scatter(
        x=[max(row["factor"], 1.0) for row in shown],
        y=[row["name"] for row in shown],
        mode="text",
        text=[f"  × {row['factor']:.2f}" for row in shown],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )
    factors = [row["factor"] for row in shown] or [1.0]
    low, high = min(*factors, 1.0), max(*factors, 1.0)
    room = 0.22 * max(high - low, 0.2)
    figure.add_vline(x=1, line_width=1, line_color=OTHER_COLOUR)
    figure.update_xaxes(title="times the choice above", range=[max(0, low - room), high + room])
    figure.update_yaxes(
        autorange="reversed",
        categoryorder="array",
        categoryarray=[row["name"] for row in shown],
        showgrid=False,
    )
    return figure


def rates_figure(rows: Sequence[Row], quantity: str) -> go.Figure:
    """Return a latency's p50 and p90 over the arrival rate, continuous and static.

    Rows hold rate_per_s, way, p50_s and p90_s.
    """
    figure = base_figure(CURVE_PX)
    for way, colour in (("continuous", PREDICTED_COLOUR), ("static", OTHER_COLOUR)):
        own = [row for row in rows if row["way"] == way]
        for percentile, dash in (("p50", "solid"), ("p90", "dash")):
            figure.add_scatter(
                name=f"{way} {percentile}",
                x=[row["rate_per_s"] for row in own],
                y=[1e3 * row[f"{percentile}_s"] for row in own],
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"symbol": "circle-open", "size": 6},
                customdata=[format_seconds(row[f"{percentile}_s"]) for row in own],
                hovertemplate=f"{way}, %{{x:.3g}} a second: {percentile} "
                "<b>%{customdata}</b><extra></extra>",
            )
    figure.update_xaxes(type="log", title="requests a second")
    figure.update_yaxes(type="log", title=f"{quantity}, ms", dtick=1, exponentformat="none")
    ticks = sorted({row["rate_per_s"] for row in rows})
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:.3g}" for tick in ticks])
    return figure


def timeline_figure(requests: Sequence[Row]) -> go.Figure:
    """Return a bar for each request from its arrival to its end: waiting, its prompt, its tokens.

    Requests hold arrival_s, waited_s, ttft_s, e2e_s, prompt_tokens, new_tokens and preemptions.
    """
    figure = base_figure(MARGIN_PX + TIMELINE_ROW_PX * len(requests), barmode="overlay")
    for name, colour in PHASES.items():
        spans = [_span(row, name) for row in requests]
        figure.add_bar(
            name=name,
            y=list(range(1, len(requests) + 1)),
            base=[begin for begin, _ in spans],
            x=[length for _, length in spans],
            orientation="h",
            width=0.8,
            marker=predicted_marker(colour)
            if name != "waits"
            else {"color": translucent(colour, 0.45), "line": {"width": 0}},
            customdata=[_request_words(row) for row in requests],
            hovertemplate=f"request %{{y}}, {name} <b>%{{x:.3f}} s</b><br>%{{customdata}}"
            "<extra></extra>",
        )
    again = [(row, at) for at, row in enumerate(requests, start=1) if row["preemptions"]]
    if again:
        figure.add_scatter(
            name="gave its pages back",
            x=[row["arrival_s"] + row["e2e_s"] for row, _ in again],
            y=[at for _, at in again],
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": VERDICT_COLOURS["does_not_fit"]},
            customdata=[row["preemptions"] for row, _ in again],
            hovertemplate="request %{y}: %{customdata} times<extra></extra>",
        )
    figure.update_xaxes(title="seconds since the trace began", rangemode="tozero")
    figure.update_yaxes(title="request, by arrival", autorange="reversed", showgrid=False)
    return figure


def _span(row: Row, phase: str) -> tuple[float, float]:
    waited_s = row["e2e_s"] if row["waited_s"] is None else row["waited_s"]
    first_s = row["e2e_s"] if row["ttft_s"] is None else row["ttft_s"]
    places = {
        "waits": (0.0, waited_s),
        "prompt": (waited_s, first_s),
        "tokens": (first_s, row["e2e_s"]),
    }
    begin, end = places[phase]
    return row["arrival_s"] + begin, max(0.0, end - begin)


def _request_words(row: Row) -> str:
    first = "no token" if row["ttft_s"] is None else f"first token {format_seconds(row['ttft_s'])}"
    return f"{row['prompt_tokens']:,} → {row['new_tokens']:,} tokens, {first}, {row['state']}"


def course_figure(samples: Sequence[Row], rows: int, pages: int) -> go.Figure:
    """Return what waits and runs, and how full the cache is, over time.

    Samples hold time_s, waiting, running and pages.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    times_s = [row["time_s"] for row in samples]
    for name, key, colour in (
        ("waiting", "waiting", WAITING_COLOUR),
        ("running", "running", PREDICTED_COLOUR),
    ):
        figure.add_scatter(
            name=name,
            x=times_s,
            y=[row[key] for row in samples],
            mode="lines",
            line={"color": colour, "width": 1.5, "shape": "hv"},
            fill="tozeroy",
            fillcolor=translucent(colour, 0.15),
            hovertemplate=f"%{{x:.3f}} s: %{{y}} {name}<extra></extra>",
            row=1,
            col=1,
        )
    cache = component_colour("kv_cache")
    figure.add_scatter(
        name="cache",
        x=times_s,
        y=[100 * row["pages"] / pages for row in samples],
        mode="lines",
        line={"color": cache, "width": 1.5, "shape": "hv"},
        fill="tozeroy",
        fillcolor=translucent(cache, 0.15),
        hovertemplate="%{x:.3f} s: %{y:.1f} % of the pages<extra></extra>",
        row=2,
        col=1,
    )
    styled = base_figure(COURSE_PX).layout
    figure.update_layout(
        height=styled.height,
        margin=styled.margin,
        legend=styled.legend,
        hoverlabel=styled.hoverlabel,
        dragmode=False,
    )
    figure.update_xaxes(automargin=True)
    figure.update_xaxes(title="seconds since the trace began", row=2, col=1)
    figure.update_yaxes(automargin=True, rangemode="tozero")
    figure.update_yaxes(title=f"requests (rows: {rows})", row=1, col=1)
    figure.update_yaxes(title="cache, %", row=2, col=1)
    return figure


def compared_figure(rows: Sequence[Row]) -> go.Figure:
    """Return simulated over measured percentiles, both in ms, with the diagonal where they agree.

    Rows hold what, quantity, percentile, predicted_s and measured_s.
    """
    figure = base_figure(CURVE_PX)
    values = [1e3 * row[key] for row in rows for key in ("predicted_s", "measured_s")]
    low, high = min(values) / 1.5, max(values) * 1.5
    figure.add_scatter(
        name="equal",
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": OTHER_COLOUR, "dash": "dash", "width": 1},
        hoverinfo="skip",
    )
    for colour, name in zip(
        LINE_COLOURS, dict.fromkeys(row["quantity"] for row in rows), strict=False
    ):
        own = [row for row in rows if row["quantity"] == name]
        figure.add_scatter(
            name=name,
            x=[1e3 * row["measured_s"] for row in own],
            y=[1e3 * row["predicted_s"] for row in own],
            mode="markers",
            marker={"symbol": RECORDED_SYMBOL, "size": 9, "color": colour},
            customdata=[
                [
                    row["what"],
                    row["percentile"],
                    format_signed(100 * (row["predicted_s"] / row["measured_s"] - 1), 1),
                ]
                for row in own
            ],
            hovertemplate=f"%{{customdata[0]}}<br>{name}, %{{customdata[1]}}: simulated %{{y:.3g}} ms, "
            "measured %{x:.3g} ms, <b>%{customdata[2]}</b><extra></extra>",
        )
    figure.update_xaxes(type="log", title="measured, ms", dtick=1, exponentformat="none")
    figure.update_yaxes(type="log", title="simulated, ms", dtick=1, exponentformat="none")
    return figure
