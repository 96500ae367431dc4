"""Figures of the Attention page, from rows chosen by hand."""

from __future__ import annotations

from math import log10
from typing import Any

from app.charts.attention import (
    bars_figure,
    distance_figure,
    memory_curves_figure,
    roofline_figure,
    time_curves_figure,
)
from planner.units import GIB_BYTES as GIB


def bar(variant: str, predicted: float, **measured: Any) -> dict[str, Any]:
    return {"variant": variant, "predicted": predicted, "measured": None, **measured}


def text(value: float) -> str:
    return f"{value:g} s"


def test_predictions_are_hatched_runs_here_filled_and_others_dots() -> None:
    rows = [
        bar("sdpa", 1.0, measured=2.0, here=True, place="measured here on X"),
        bar("triton", 1.0),
        bar("window", 0.5, measured=4.0, here=False, place="recorded elsewhere on X"),
    ]
    figure = bars_figure(rows, text, "seconds")
    drawn = [trace for trace in figure.data if trace.x[0] is not None]
    assert [trace.type for trace in drawn] == ["bar", "bar", "bar", "bar", "scatter"]
    assert [bool(t.marker.pattern.shape) for t in drawn[:4]] == [True, False, True, True]
    assert drawn[1].x == (2.0,) and drawn[1].text == ("2 s",)
    assert drawn[4].marker.symbol == "circle" and "recorded elsewhere" in drawn[4].hovertemplate
    names = [trace.name for trace in figure.data if trace.name]
    assert names == ["predicted", "measured here", "recorded elsewhere"]
    # Kernels are apart from algorithms by a line; the axis holds the smallest and the largest bar.
    assert len(figure.layout.shapes) == 1
    assert [a.text for a in figure.layout.annotations] == [
        "↑ kernels: exact",
        "↓ algorithms: another result",
    ]
    low, high = figure.layout.xaxis.range
    assert low < log10(0.5) and high > log10(4.0)
    assert not bars_figure(rows[:2], text, "seconds").layout.shapes


def points(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "sequence_length": length,
            "device_bytes": gib * GIB,
            "forward_s": length * 1e-6,
            "fits": gib <= 80,
        }
        for length, gib in sizes
    ]


CURVES = {"eager": points((1024, 2), (2048, 400)), "triton": points((1024, 1), (2048, 2))}


def test_the_memory_curve_marks_the_end_of_eager_at_the_capacity() -> None:
    measured = [
        {
            "variant": "eager",
            "sequence_length": 2048,
            "device_bytes": 80 * GIB,
            "here": True,
            "outcome": "oom_device",
        }
    ]
    figure = memory_curves_figure(CURVES, measured, 1500, 80 * GIB, "GiB")
    traces = {trace.name: trace for trace in figure.data if trace.name}
    assert traces["eager"].y == (2, 400) and traces["ours"].line.dash == "solid"
    assert traces["capacity 80.00 GiB"].y == (80, 80)
    end = traces["eager out of memory"]
    assert (end.x, end.y) == ((1500,), (80,))
    seen = next(t for t in figure.data if "measured here" in (t.hovertemplate or ""))
    assert seen.marker.symbol == "x" and "out of memory" in seen.hovertemplate


def test_a_time_curve_ends_where_memory_ends() -> None:
    figure = time_curves_figure(CURVES, [], "forward")
    eager = next(trace for trace in figure.data if trace.name == "eager")
    assert eager.x == (1024,)
    crosses = [trace for trace in figure.data if trace.marker.symbol == "x"]
    assert [(cross.x, cross.y[0]) for cross in crosses] == [((1024,), 1.024)]


def test_points_lie_under_the_roofs_of_sheet_and_card() -> None:
    roofs = [
        {"name": "vendor", "flop_s": 1e15, "bytes_s": 5e12, "measured": False},
        {"name": "card", "flop_s": 8e14, "bytes_s": 4e12, "measured": True},
    ]
    point = {
        "variant": "window",
        "intensity": 10.0,
        "predicted_flop_s": 5e13,
        "measured_flop_s": 2e13,
        "here": True,
        "place": "here",
    }
    figure = roofline_figure([point], roofs, (1.0, 1000.0))
    vendor, card, predicted, measured = figure.data
    # The bend is at 1e15 / 5e12 = 200 FLOPs per byte.
    assert vendor.x == (1.0, 200.0, 1000.0) and vendor.y == (5.0, 1000.0, 1000.0)
    assert (vendor.line.dash, card.line.dash) == ("dash", "solid")
    assert predicted.y == (50.0,) and predicted.marker.symbol == "diamond-open"
    assert measured.y == (20.0,) and measured.marker.symbol == "square"


def test_a_distance_is_a_share_of_the_exact_result() -> None:
    row = {"variant": "linear", "distance": 0.61, "here": False, "place": "elsewhere"}
    figure = distance_figure([row])
    assert figure.data[0].text == ("61.0 %",) and figure.data[0].y == ("linear",)
