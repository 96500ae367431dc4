"""The timeline: a stack that sums to its outline, and the measured line over it."""

from __future__ import annotations

from typing import Any

import pytest

from app.charts.timeline import END, HIGH, timeline_figure

MIB = 2**20


def section(label: str, high: dict[str, int], end: dict[str, int]) -> dict[str, Any]:
    parts = {"high_parts": high, "end_parts": end}
    scaled = {key: {name: n * MIB for name, n in sizes.items()} for key, sizes in parts.items()}
    return {"label": label, "words": label, **scaled}


SCALED = [
    section("embed", {"parameters": 90, "temporary": 10}, {"parameters": 90}),
    section(
        "layer 0",
        {"parameters": 90, "activations": 60},
        {"parameters": 90, "activations": 30},
    ),
]


def test_the_stack_sums_to_the_outline_and_the_peak_is_marked() -> None:
    figure = timeline_figure(SCALED, "GiB")
    stacked = [trace for trace in figure.data if trace.stackgroup]
    (outline,) = [trace for trace in figure.data if trace.name == "predicted"]
    assert {trace.name for trace in stacked} == {"parameters", "temporary", "activations"}
    assert list(outline.y) == [100, 90, 150, 120]
    assert [sum(ys) for ys in zip(*(trace.y for trace in stacked), strict=True)] == [
        100,
        90,
        150,
        120,
    ]
    assert figure.layout.annotations[0].x == 1 + HIGH
    assert "150.00 MiB" in figure.layout.annotations[0].text


def test_the_measured_line_lies_over_the_sections_of_its_labels() -> None:
    measured = [["layer 0", 121 * MIB, 140 * MIB], ["not there", 1, 1]]
    figure = timeline_figure(SCALED, "GiB", measured)
    (line,) = [trace for trace in figure.data if trace.name == "measured"]
    assert list(line.x) == [1 + HIGH, 1 + END]
    assert list(line.y) == pytest.approx([140, 121])
