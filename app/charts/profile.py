"""Where the time of a profiled step goes, part by part."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.style import COMPONENT_COLOURS, base_figure, translucent
from planner.time_parts import PART_WORDS, Part
from planner.time_shares import Ceiling
from planner.units import format_seconds

ROW_HEIGHT_PX = 34
MARGIN_PX = 80
PART_COLOURS = {
    Part.ATTENTION: COMPONENT_COLOURS["attention"],
    Part.MATMUL: COMPONENT_COLOURS["parameters"],
    Part.ELEMENTWISE: COMPONENT_COLOURS["activations"],
    Part.OPTIMIZER: COMPONENT_COLOURS["optimizer"],
    Part.COMMUNICATION: COMPONENT_COLOURS["gathered"],
    Part.COPIES: COMPONENT_COLOURS["temporary"],
    Part.OTHER: COMPONENT_COLOURS["workspace"],
    Part.HOST: COMPONENT_COLOURS["nccl"],
    Part.DATA: COMPONENT_COLOURS["gradients"],
}


def profile_figure(parts: Sequence[Ceiling]) -> go.Figure:
    """Return a bar per part: filled where it runs alone, light where other work runs beside it.

    The text at its end is the most that its removal brings end to end.
    """
    shown = [one for one in parts if one.time_s > 0]
    figure = base_figure(MARGIN_PX + ROW_HEIGHT_PX * len(shown), barmode="stack", showlegend=False)
    names = [PART_WORDS[one.part] for one in shown]
    colours = [PART_COLOURS[one.part] for one in shown]
    scale, unit = (1e3, "ms") if max(one.time_s for one in shown) < 1 else (1.0, "s")
    hidden = [max(0.0, one.time_s - one.alone_s) for one in shown]
    figure.add_bar(
        y=names,
        x=[one.alone_s * scale for one in shown],
        orientation="h",
        marker={"color": colours, "line": {"width": 0}},
        customdata=[[format_seconds(one.alone_s), f"{one.speedup:.2f}"] for one in shown],
        hovertemplate="%{y}: %{customdata[0]} alone, made free %{customdata[1]}x<extra></extra>",
        text=["" if h else f" {one.speedup:.2f}x" for one, h in zip(shown, hidden, strict=True)],
        textposition="outside",
        cliponaxis=False,
    )
    figure.add_bar(
        y=names,
        x=[seconds * scale for seconds in hidden],
        orientation="h",
        marker={"color": [translucent(colour, 0.3) for colour in colours], "line": {"width": 0}},
        customdata=[format_seconds(seconds) for seconds in hidden],
        hovertemplate="%{y}: %{customdata} beside other work<extra></extra>",
        text=[f" {one.speedup:.2f}x" if h else "" for one, h in zip(shown, hidden, strict=True)],
        textposition="outside",
        cliponaxis=False,
    )
    reach = scale * max(one.time_s for one in shown)
    figure.update_xaxes(title=unit, range=[0, 1.15 * reach])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure
