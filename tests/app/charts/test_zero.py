"""Figures of the ZeRO page, from rows chosen by hand."""

from __future__ import annotations

from typing import Any

import pytest

from app.charts.zero import holds_figure, row_label, sends_figure
from planner.units import GIB_BYTES as GIB

SENT = {"collective": "all_gather", "calls": 3, "payload_bytes": 8 * GIB}
MEASURED = {
    "engine": "fsdp2",
    "zero_stage": 3,
    "world_size": 8,
    "allocated_bytes": 11 * GIB,
    "parameters": 2 * GIB,
    "optimizer": 4 * GIB,
}


def row(engine: str, ideal: int | None = 9 * GIB) -> dict[str, Any]:
    return {
        "engine": engine,
        "zero_stage": 3,
        "world_size": 8,
        "allocated_bytes": 10 * GIB,
        "parts": {"parameters": 2 * GIB, "optimizer": 4 * GIB, "activations": 4 * GIB, "other": 0},
        "ideal_bytes": ideal,
        "distance_percent": None if ideal is None else 100 / 9,
        "sent": [{**SENT, "sent_bytes": 7 * GIB, "time_s": 0.016}],
    }


def test_a_row_is_hatched_its_measurement_filled_below_and_the_ideal_a_tick() -> None:
    figure = holds_figure([row("peakmark"), row("fsdp2")], [MEASURED], 12 * GIB, "GiB")
    bars = {bar.name: bar for bar in figure.data}
    assert list(bars) == [
        *("parameters", "optimizer", "activations"),
        *("parameters, measured", "optimizer, measured", "rest, measured"),
        "ideal",
    ]
    assert bars["optimizer"].marker.pattern.shape == "/"
    assert bars["optimizer, measured"].marker.pattern.shape is None
    assert list(bars["rest, measured"].x) == [5]
    # The second row's measurement lies below its prediction, which is at 1.
    assert list(bars["optimizer"].y) == [0, 1] and bars["optimizer, measured"].y[0] > 1
    assert list(bars["ideal"].x) == [9, 9]
    assert list(figure.layout.yaxis.ticktext) == ["peakmark 3 × 8", "fsdp2 3 × 8"]


def test_a_split_model_has_no_ideal() -> None:
    figure = holds_figure([row("peakmark", ideal=None)], [], 12 * GIB, "GiB")
    assert "ideal" not in [bar.name for bar in figure.data]


def test_times_of_collectives_are_stacked_in_milliseconds() -> None:
    silent = {**row("fsdp2"), "sent": []}
    figure = sends_figure([row("peakmark"), silent], "GiB")
    assert [bar.name for bar in figure.data] == ["all-gather"]
    assert list(figure.data[0].y) == [row_label(row("peakmark"))]
    assert list(figure.data[0].x) == [pytest.approx(16)]
