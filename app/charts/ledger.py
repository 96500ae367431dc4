"""Figures of a ledger: every named tensor at the peak, by the area it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from app.charts.style import base_figure, component_colour, size_text, translucent, words, wrapped

TREEMAP_HEIGHT_PX = 460
# Beyond these the tiles are too small to see; what is left over is one tile, so that areas add up.
MAX_TILES = 250
WHOLE = "peak"
HATCH_COLOUR = "rgba(255,255,255,0.18)"


def treemap_figure(entries: Sequence[Mapping[str, Any]], unit: str) -> go.Figure:
    """Return the tensors as tiles inside their components; area is bytes.

    `entries` are ledger rows (`name`, `component`, `bytes`, `shape_text`, `dtype`, `count`,
    `formula`); rows without bytes, or below none, have no area and are left out.
    """
    tiles = _tiles([entry for entry in entries if entry["bytes"] > 0], unit)
    figure = base_figure(TREEMAP_HEIGHT_PX)
    figure.add_treemap(
        ids=[tile["id"] for tile in tiles],
        labels=[tile["label"] for tile in tiles],
        parents=[tile["parent"] for tile in tiles],
        values=[tile["bytes"] for tile in tiles],
        text=[size_text(tile["bytes"], unit) for tile in tiles],
        customdata=[tile["hover"] for tile in tiles],
        marker={
            "colors": [tile["fill"] for tile in tiles],
            "line": {"color": [tile["colour"] for tile in tiles], "width": 1.2},
            # Hatched: the sign of a prediction.
            "pattern": {
                "shape": ["/" if tile["hatched"] else "" for tile in tiles],
                "bgcolor": [tile["fill"] for tile in tiles],
                "fgcolor": HATCH_COLOUR,
                "size": 7,
                "solidity": 0.25,
            },
        },
        textfont={"color": [tile["text_colour"] for tile in tiles]},
        branchvalues="total",
        texttemplate="%{label}<br>%{text}",
        hovertemplate="%{customdata}<extra></extra>",
        pathbar={"visible": True, "thickness": 18},
        tiling={"pad": 2},
        sort=True,
    )
    figure.update_layout(uniformtext={"minsize": 9, "mode": "hide"})
    return figure


def _tiles(entries: Sequence[Mapping[str, Any]], unit: str) -> list[dict[str, Any]]:
    """The whole, its components, and the tensors of each, in the order of their bytes."""
    shown = sorted(entries, key=lambda entry: -entry["bytes"])
    totals: dict[str, int] = {}
    for entry in shown:
        totals[entry["component"]] = totals.get(entry["component"], 0) + entry["bytes"]
    whole_bytes = sum(totals.values())
    tiles = [_branch(WHOLE, "", whole_bytes, "#7D8796", whole_bytes, unit)]
    for name, total_bytes in totals.items():
        tiles.append(_branch(name, WHOLE, total_bytes, component_colour(name), whole_bytes, unit))
    tiles += [_leaf(number, entry, unit) for number, entry in enumerate(shown[:MAX_TILES])]
    for name in totals:
        rest = [entry["bytes"] for entry in shown[MAX_TILES:] if entry["component"] == name]
        if rest:
            tiles.append(_rest(name, len(rest), sum(rest), unit))
    return tiles


def _branch(
    name: str, parent: str, size_bytes: int, colour: str, whole_bytes: int, unit: str
) -> dict[str, Any]:
    share = 100 * size_bytes / whole_bytes if whole_bytes else 0.0
    return {
        "id": name,
        "label": f"<b>{words(name)}</b>",
        "parent": parent,
        "bytes": size_bytes,
        "colour": colour,
        "fill": translucent(colour, 0.14),
        "text_colour": colour,
        "hatched": False,
        "hover": f"<b>{words(name)}</b><br>{size_text(size_bytes, unit)}, {share:.1f} %",
    }


def _leaf(number: int, entry: Mapping[str, Any], unit: str) -> dict[str, Any]:
    shape = f"{entry['count']} × [{entry['shape_text']}] {entry['dtype']}<br>"
    return {
        "id": f"{entry['component']}/{number}",
        "label": entry["name"],
        "parent": entry["component"],
        "bytes": entry["bytes"],
        **_solid(entry["component"]),
        "hover": f"<b>{entry['name']}</b><br>{size_text(entry['bytes'], unit)}<br>"
        f"{shape if entry['shape_text'] else ''}{wrapped(entry['formula'])}",
    }


def _solid(component: str) -> dict[str, Any]:
    """Opaque, with white text: readable on the light and on the dark page."""
    colour = component_colour(component)
    return {"colour": colour, "fill": colour, "text_colour": "#FFFFFF", "hatched": True}


def _rest(component: str, count: int, size_bytes: int, unit: str) -> dict[str, Any]:
    name = f"{count} smaller tensors"
    return {
        "id": f"{component}/rest",
        "label": name,
        "parent": component,
        "bytes": size_bytes,
        **_solid(component),
        "hover": f"<b>{name}</b> of {words(component)}<br>{size_text(size_bytes, unit)}",
    }
