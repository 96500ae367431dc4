"""The bars are the prediction's bytes."""

from __future__ import annotations

from typing import Any

import pytest

from app.charts.memory import breakdown_figure, phases_figure

GIB = 2**30


def test_the_breakdown_shows_every_part_with_its_bytes_and_formula(memory: dict[str, Any]) -> None:
    parts = [*memory["components"], *memory["overheads"]]
    figure = breakdown_figure(parts, 80 * GIB, "GiB")
    shown = {trace.name: trace.x[0] for trace in figure.data}
    assert shown == {
        "parameters": 16,
        "gradients": 2,
        "optimizer": 12,
        "gathered": 1,
        "activations": 8,
        "attention": 3,
        "logits": 4,
        "segments": 2,
        "context": 0.5,
    }
    assert sum(shown.values()) * GIB == memory["device_bytes"]
    assert "by hand for logits" in figure.data[6].hovertemplate
    assert figure.layout.shapes[0].x0 == 80


def test_predicted_bars_are_hatched(memory: dict[str, Any]) -> None:
    figure = breakdown_figure(memory["components"], 80 * GIB, "GiB")
    assert all(trace.marker.pattern.shape == "/" for trace in figure.data)


def test_gb_is_decimal(memory: dict[str, Any]) -> None:
    figure = breakdown_figure(memory["components"], 80 * GIB, "GB")
    assert figure.data[0].x[0] == pytest.approx(17.179869184)
    assert figure.layout.xaxis.title.text.startswith("GB")


def test_phases_stack_to_their_allocated_bytes_and_the_peak_is_marked(
    memory: dict[str, Any],
) -> None:
    figure = phases_figure(memory, "GiB")
    totals = [sum(trace.x[i] for trace in figure.data) for i in range(3)]
    assert totals == [23, 46, 30]
    assert figure.layout.annotations[0].x == 46


def test_a_tiny_plan_is_drawn_in_mib() -> None:
    phases = [{"name": "f", "label": "f", "allocated_bytes": 3 * 2**20, "parts": {"a": 3 * 2**20}}]
    figure = phases_figure({"phases": phases, "peak_phase": "f"}, "GiB")
    assert figure.data[0].x == (3,)
    assert figure.layout.xaxis.title.text == "MiB allocated"


@pytest.mark.parametrize(("times_capacity", "side"), [(0.5, "right"), (1.5, "right"), (4, "left")])
def test_the_label_of_the_capacity_goes_where_there_is_room(
    times_capacity: float, side: str
) -> None:
    capacity_bytes = 100 * 2**30
    parts = [{"name": "logits", "bytes": round(times_capacity * capacity_bytes), "formula": ""}]
    [label] = breakdown_figure(parts, capacity_bytes, "GiB").layout.annotations
    assert label.xanchor == side
