"""Figures of serving: predictions hollow or hatched, measurements filled, spans that add up."""

from __future__ import annotations

from typing import Any

from app.charts import serving as charts

REQUEST: dict[str, Any] = {
    "arrival_s": 1.0, "prompt_tokens": 10, "new_tokens": 5, "waited_s": 0.2, "ttft_s": 0.5,
    "e2e_s": 0.9, "preemptions": 0, "state": "done",
}  # fmt: skip


def test_a_request_s_spans_join_from_arrival_to_end() -> None:
    figure = charts.timeline_figure([REQUEST, {**REQUEST, "preemptions": 2}])
    spans = {trace.name: (trace.base[0], trace.x[0]) for trace in figure.data[:3]}
    assert {name: (round(b, 9), round(x, 9)) for name, (b, x) in spans.items()} == {
        "waits": (1.0, 0.2), "prompt": (1.2, 0.3), "tokens": (1.5, 0.4),
    }  # fmt: skip
    assert figure.data[3].name == "gave its pages back"
    assert list(figure.data[3].y) == [2]


def test_a_request_that_never_ran_only_waits() -> None:
    never = {**REQUEST, "waited_s": None, "ttft_s": None, "state": "cancelled"}
    figure = charts.timeline_figure([never])
    assert [round(trace.x[0], 9) for trace in figure.data] == [0.9, 0.0, 0.0]


def test_a_speed_line_ends_where_memory_ends_and_measured_points_are_filled() -> None:
    measured = {
        "batch": 4, "context": 900, "decode_s": 0.002, "what": "a", "here": False, "place": "recorded"
    }  # fmt: skip
    figure = charts.speed_figure({"a": [(1, 0.001, True), (2, 0.0011, False)]}, [measured])
    line, cross, dot = figure.data
    assert (list(line.x), line.marker.symbol) == ([1], "circle-open")
    assert cross.marker.symbol == "x"
    assert (list(dot.y), dot.marker.symbol, dot.marker.color) == ([2.0], "circle", line.line.color)


def test_levers_start_at_one_and_those_that_do_not_fit_are_left_out() -> None:
    rows = [
        {"name": "fp8", "kind": "system", "factor": 2.0, "value": 8},
        {"name": "mqa", "kind": "model", "factor": 0.5, "value": 2},
        {"name": "many", "kind": "system", "factor": None, "value": None},
    ]
    figure = charts.levers_figure(rows, str)
    assert [(trace.name, list(trace.x), trace.base) for trace in figure.data[:2]] == [
        ("system lever", [1.0], 1), ("model lever", [-0.5], 1),
    ]  # fmt: skip
    # The factor stands right of every bar, never on the lever's name.
    assert list(figure.data[2].x) == [2.0, 1.0]


def test_capacity_rates_course_and_comparison_hold_what_they_are_given() -> None:
    capacity = charts.capacity_figure({"bf16": [(1024, 8), (2048, 0)]}, 1500)
    assert list(capacity.data[0].x) == [1024]
    rate = {"rate_per_s": 2.0, "way": "static", "p50_s": 0.1, "p90_s": 0.2}
    rates = charts.rates_figure([rate], "first token")
    assert [list(trace.y) for trace in rates.data] == [[], [], [100.0], [200.0]]
    sample = {"time_s": 0.5, "waiting": 1, "running": 2, "pages": 5}
    course = charts.course_figure([sample], 4, 20)
    assert [list(trace.y) for trace in course.data] == [[1], [2], [25.0]]
    row = {
        "what": "a", "quantity": "time per token", "percentile": "p50", "predicted_s": 0.001,
        "measured_s": 0.002,
    }  # fmt: skip
    compared = charts.compared_figure([row])
    assert (list(compared.data[1].x), list(compared.data[1].y)) == ([2.0], [1.0])
    assert compared.data[1].customdata[0][2] == "-50.0 %"
