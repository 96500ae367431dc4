"""Predicted and measured stand on one axis, hatched and filled."""

from __future__ import annotations

import pytest

from app.charts.proof import (
    comparison_figure,
    error_percent,
    residual_figure,
    residual_strip_figure,
    timing_figure,
)

GIB = 2**30
ROWS = [
    {"label": "allocated", "predicted_bytes": 11 * GIB, "measured_bytes": 10 * GIB},
    {"label": "reserved", "predicted_bytes": 12 * GIB, "measured_bytes": None},
]


def test_both_sides_have_their_own_bytes_and_marks() -> None:
    predicted, measured = comparison_figure(ROWS, "GiB").data
    assert (predicted.name, tuple(predicted.x)) == ("predicted", (11, 12))
    assert (measured.name, tuple(measured.x)) == ("measured", (10,))
    assert predicted.marker.pattern.shape == "/"
    assert measured.marker.pattern.shape is None


def test_a_residual_is_signed_and_needs_both_sides() -> None:
    bars = residual_figure(ROWS).data[0]
    assert tuple(bars.y) == ("allocated",)
    assert bars.x[0] == pytest.approx(10.0)
    assert error_percent(9, 10) == pytest.approx(-10.0)


def test_calibration_dots_are_apart_from_evidence() -> None:
    points = [
        {"group": "engine fsdp2", "error_percent": 1.5, "label": "row a", "role": "evidence"},
        {"group": "engine fsdp2", "error_percent": -2.0, "label": "row b", "role": "calibration"},
    ]
    dots = {trace.name: tuple(trace.x) for trace in residual_strip_figure(points).data}
    assert dots == {"evidence": (1.5,), "calibration": (-2.0,)}


def test_groups_keep_their_order_whatever_the_role_of_their_rows() -> None:
    rest = {"error_percent": 1.0, "label": "row"}
    points = [
        {"group": "a", "role": "holdout", **rest},
        {"group": "b", "role": "evidence", **rest},
    ]
    assert list(residual_strip_figure(points).layout.yaxis.categoryarray) == ["a", "b"]


def test_a_click_on_a_dot_gives_back_its_row() -> None:
    point = {"group": "g", "error_percent": 1.0, "label": "m", "role": "evidence", "row_id": "ab"}
    (trace,) = residual_strip_figure([point]).data
    assert tuple(trace.customdata) == ("ab",)


def test_operations_keep_their_order_whatever_bounds_them() -> None:
    operations = [
        {"name": "b", "time_s": 0.002, "bound": "hbm"},
        {"name": "a", "time_s": 0.001, "bound": "compute"},
    ]
    figure = timing_figure(operations)
    assert list(figure.layout.yaxis.categoryarray) == ["b", "a"]
    assert {trace.name: trace.x[0] for trace in figure.data} == {
        "bound by hbm": pytest.approx(2.0),
        "bound by compute": pytest.approx(1.0),
    }
