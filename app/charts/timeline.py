"""Figures of one step over time: live bytes by component, and what was measured over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import (
    MEASURED_COLOUR,
    OTHER_COLOUR,
    PREDICTED_COLOUR,
    axis_unit,
    base_figure,
    component_colour,
    size_text,
    translucent,
    words,
)

TIMELINE_HEIGHT_PX = 430
# What a step consists of, by the sections that belong to it; drawn as bands.
BANDS: Mapping[str, tuple[str, ...]] = {
    "forward": ("embed", "layer", "head"),
    "loss": ("loss", "loss backward"),
    "backward": ("layer backward", "embed backward"),
    "optimizer": ("optimizer",),
}
STACKING: Mapping[str, int] = {
    name: place
    for place, name in enumerate(
        (
            *("parameters", "optimizer", "workspace", "rounding", "gathered"),
            *("activations", "attention", "logits", "gradients", "temporary"),
        )
    )
}
# Within a section its high point comes first, then its end.
HIGH, END = 0.0, 0.5


def timeline_figure(
    sections: Sequence[Mapping[str, Any]],
    unit: str,
    measured: Sequence[Sequence[Any]] = (),
) -> go.Figure:
    """Return live bytes over the sections of a step, stacked by component; the peak is marked.

    A section holds `label`, `words`, `high_parts` and `end_parts` (bytes by component at its
    highest moment and at its end). Rows of `measured` are [label, allocated at end, peak in it];
    they are drawn as a line over the sections of the same label.
    """
    sums = [_sums(section) for section in sections]
    reach_bytes = max(
        [0, *(high for high, _ in sums), *(row[2] for row in measured)],
    )
    divisor, unit_name = axis_unit(reach_bytes, unit)
    figure = base_figure(TIMELINE_HEIGHT_PX, hovermode="closest")
    for name in _component_names(sections):
        figure.add_scatter(**_layer(sections, name, divisor))
    figure.add_scatter(**_total(sections, sums, divisor, unit))
    if measured:
        figure.add_scatter(**_measured(sections, measured, divisor, unit))
    _mark_peak(figure, sums, divisor, unit)
    _draw_bands(figure, sections)
    figure.update_xaxes(
        title="sections of the step, in order",
        range=[-0.5, len(sections)],
        showgrid=False,
        **_ticks(sections),
    )
    figure.update_yaxes(
        title=f"{unit_name} allocated", rangemode="tozero", range=[0, 1.16 * reach_bytes / divisor]
    )
    return figure


def _sums(section: Mapping[str, Any]) -> tuple[int, int]:
    return sum(section["high_parts"].values()), sum(section["end_parts"].values())


def _component_names(sections: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stays is drawn below what comes and goes; a component not known is drawn on top."""
    names: dict[str, None] = {}
    for section in sections:
        names.update(dict.fromkeys(section["high_parts"]))
        names.update(dict.fromkeys(section["end_parts"]))
    return sorted(names, key=lambda name: STACKING.get(name, len(STACKING)))


def _layer(sections: Sequence[Mapping[str, Any]], name: str, divisor: int) -> dict[str, Any]:
    heights = [
        section[parts].get(name, 0) / divisor
        for section in sections
        for parts in ("high_parts", "end_parts")
    ]
    colour = component_colour(name)
    return {
        "name": words(name),
        "x": _places(len(sections)),
        "y": heights,
        "mode": "lines",
        "stackgroup": "live",
        "line": {"width": 0.8, "color": colour},
        "fillcolor": translucent(colour, 0.3),
        "hoverinfo": "skip",
    }


def _places(count: int) -> list[float]:
    return [index + moment for index in range(count) for moment in (HIGH, END)]


def _total(
    sections: Sequence[Mapping[str, Any]],
    sums: Sequence[tuple[int, int]],
    divisor: int,
    unit: str,
) -> dict[str, Any]:
    """The outline of the stack: one line to hover, with the parts of each moment."""
    hovers = []
    for section, (high_bytes, end_bytes) in zip(sections, sums, strict=True):
        hovers.append(_moment_text(section, "high point", high_bytes, "high_parts", unit))
        hovers.append(_moment_text(section, "end", end_bytes, "end_parts", unit))
    return {
        "name": "predicted",
        "x": _places(len(sections)),
        "y": [size / divisor for pair in sums for size in pair],
        "customdata": hovers,
        "mode": "lines",
        "line": {"color": PREDICTED_COLOUR, "width": 1.6, "dash": "dot"},
        "hovertemplate": "%{customdata}<extra>predicted</extra>",
    }


def _moment_text(
    section: Mapping[str, Any], moment: str, total_bytes: int, parts: str, unit: str
) -> str:
    lines = [
        f"{words(name)}: {size_text(size, unit)}"
        for name, size in sorted(section[parts].items(), key=lambda item: -item[1])
        if size
    ]
    head = f"<b>{section['words']}</b>, {moment}: {size_text(total_bytes, unit)}"
    return "<br>".join([head, *lines])


def _measured(
    sections: Sequence[Mapping[str, Any]],
    measured: Sequence[Sequence[Any]],
    divisor: int,
    unit: str,
) -> dict[str, Any]:
    place = {section["label"]: (index, section["words"]) for index, section in enumerate(sections)}
    points = [
        (place[label][0] + moment, size, f"<b>{place[label][1]}</b>, {name}")
        for label, end_bytes, peak_bytes in measured
        if label in place
        for moment, size, name in ((HIGH, peak_bytes, "high point"), (END, end_bytes, "end"))
    ]
    return {
        "name": "measured",
        "x": [x for x, _, _ in points],
        "y": [size / divisor for _, size, _ in points],
        "customdata": [f"{text}: {size_text(size, unit)}" for _, size, text in points],
        "mode": "lines+markers",
        "line": {"color": MEASURED_COLOUR, "width": 2},
        "marker": {"color": MEASURED_COLOUR, "size": 4},
        "hovertemplate": "%{customdata}<extra>measured</extra>",
    }


def _mark_peak(figure: go.Figure, sums: Sequence[tuple[int, int]], divisor: int, unit: str) -> None:
    if not sums:
        return
    index = max(range(len(sums)), key=lambda i: sums[i][0])
    high_bytes = sums[index][0]
    figure.add_annotation(
        x=index + HIGH,
        y=high_bytes / divisor,
        text=f"peak {size_text(high_bytes, unit)}",
        showarrow=True,
        arrowhead=2,
        ax=34 if index < len(sums) / 2 else -34,
        ay=-20,
        xanchor="left" if index < len(sums) / 2 else "right",
    )


def _band_of(label: str) -> str:
    """The band of a section, by its label without the layer's number."""
    kind = " ".join(part for part in label.split(" ") if not part.isdecimal())
    return next((name for name, kinds in BANDS.items() if kind in kinds), "")


def _draw_bands(figure: go.Figure, sections: Sequence[Mapping[str, Any]]) -> None:
    bands = [_band_of(section["label"]) for section in sections]
    starts = [i for i, name in enumerate(bands) if i == 0 or name != bands[i - 1]]
    for number, start in enumerate(starts):
        if number:
            figure.add_vline(x=start - 0.25, line_width=1, line_dash="dot", line_color=OTHER_COLOUR)


def _ticks(sections: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A tick at the middle of every band."""
    bands = [_band_of(section["label"]) for section in sections]
    middles = {
        name: (bands.index(name) + len(bands) - 1 - bands[::-1].index(name)) / 2
        for name in dict.fromkeys(bands)
    }
    return {"tickvals": list(middles.values()), "ticktext": list(middles), "tickangle": 0}
