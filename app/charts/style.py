"""What every figure shares: colours, hatching for predictions, axes, hover text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from planner.units import GB_BYTES, GIB_BYTES, MIB_BYTES, format_bytes, format_gb

# Mid-tones, so that one set is readable on the light and on the dark page.
COMPONENT_COLOURS: Mapping[str, str] = {
    "parameters": "#3B7BDB",
    "gradients": "#D58512",
    "optimizer": "#8663DA",
    "gathered": "#159FB2",
    "activations": "#34A05C",
    "kv_cache": "#159FB2",
    "attention": "#D64C80",
    "logits": "#E0573F",
    "temporary": "#A58A2C",
    "workspace": "#7D8796",
    "rounding": "#B8A48A",
    "nccl": "#4F5B6B",
    "segments": "#98A1AE",
    "context": "#626C7A",
}
VERDICT_COLOURS: Mapping[str, str] = {
    "fits": "#2A9150",
    "tight": "#C77700",
    "does_not_fit": "#D43A2F",
}
OTHER_COLOUR = "#7D8796"
PREDICTED_COLOUR = "#3B7BDB"
MEASURED_COLOUR = "#34A05C"
WRAP_COLUMNS = 64


def component_colour(name: str) -> str:
    """Return the colour of a memory component; it is the same in every figure."""
    return COMPONENT_COLOURS.get(name, OTHER_COLOUR)


def translucent(colour: str, alpha: float) -> str:
    """Return `#rrggbb` as an rgba() string of opacity `alpha`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def predicted_marker(colour: str) -> dict[str, Any]:
    """Return a hatched, outlined bar marker: the sign of a prediction."""
    pattern = {
        "shape": "/",
        "fillmode": "replace",
        "fgcolor": translucent(colour, 0.55),
        "bgcolor": translucent(colour, 0.22),
        "size": 7,
        "solidity": 0.35,
    }
    return {"color": colour, "pattern": pattern, "line": {"color": colour, "width": 1.5}}


def measured_marker(colour: str) -> dict[str, Any]:
    """Return a filled bar marker: the sign of a measurement."""
    return {"color": colour, "line": {"color": colour, "width": 1.5}}


def wrapped(text: str) -> str:
    """Break a long hover text into lines of the figure's markup."""
    return "<br>".join(textwrap.wrap(text, WRAP_COLUMNS, break_long_words=False)) or text


def words(name: str) -> str:
    """Return a field name as people read it: `loss_backward` becomes `loss backward`."""
    return name.replace("_", " ")


def base_figure(height_px: int, **layout: Any) -> go.Figure:
    """Return an empty figure with the shared margins, legend and hover settings."""
    figure = go.Figure()
    figure.update_layout(
        height=height_px,
        margin={"l": 8, "r": 12, "t": 24, "b": 8},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
        },
        hoverlabel={"align": "left"},
        dragmode=False,
        **layout,
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def add_capacity_line(figure: go.Figure, capacity: float, label: str, reach: float) -> None:
    """Draw the capacity of the GPU as an upright line with its label above the bars.

    On an axis up to `reach` the label goes to the side that has room for it.
    """
    figure.add_vline(
        x=capacity,
        line_dash="dash",
        line_color=VERDICT_COLOURS["does_not_fit"],
        line_width=2,
        annotation_text=label,
        annotation_position="top",
        annotation_xanchor="right" if capacity > reach / 2 else "left",
        annotation_font_size=12,
    )


def axis_unit(largest_bytes: float, unit: str) -> tuple[int, str]:
    """Return the divisor and the name of the unit for an axis reaching `largest_bytes`.

    `unit` is what the person chose, "GiB" or "GB"; small plans are drawn in MiB or MB.
    """
    small = largest_bytes < 0.5 * GIB_BYTES
    if unit == "GB":
        return (GB_BYTES // 1000, "MB") if small else (GB_BYTES, "GB")
    return (MIB_BYTES, "MiB") if small else (GIB_BYTES, "GiB")


def signed(text: str) -> str:
    """Return a number's text with a minus sign in the place of a leading hyphen."""
    return f"−{text[1:]}" if text.startswith("-") else text


def size_text(size_bytes: float, unit: str) -> str:
    """Return a size as text in the unit the person chose, "GiB" or "GB"."""
    return format_gb(size_bytes) if unit == "GB" else format_bytes(size_bytes)
