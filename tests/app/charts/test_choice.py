"""Heat map and curves place the planner's numbers where they belong."""

from __future__ import annotations

from app.charts.choice import attention_figure, heat_map_figure

GIB = 2**30


def _cell(stage: int, world: int, gib: float, verdict: str) -> dict[str, object]:
    place = {"zero_stage": stage, "world_size": world}
    return {**place, "device_bytes": int(gib * GIB), "verdict": verdict}


def test_the_heat_map_has_a_row_per_stage_and_frames_the_plan() -> None:
    cells = [
        _cell(2, 1, 100.4, "does_not_fit"),
        _cell(3, 1, 75.0, "tight"),
        _cell(2, 8, 30.2, "fits"),
        _cell(3, 8, 7.25, "fits"),
    ]
    figure = heat_map_figure(cells, (3, 8), "GiB")
    heat = figure.data[0]
    assert list(heat.y) == ["ZeRO 2", "ZeRO 3"]
    assert [list(row) for row in heat.z] == [[2, 0], [1, 0]]
    assert [list(row) for row in heat.text] == [["100<br>✗", "30"], ["75<br>~", "7.2"]]
    frame = figure.layout.shapes[0]
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (0.5, 1.5, 0.5, 1.5)


def test_a_plan_outside_the_heat_map_has_no_frame() -> None:
    figure = heat_map_figure([_cell(3, 1, 1, "fits")], (0, 1), "GiB")
    assert not figure.layout.shapes


def test_each_kernel_is_a_curve_in_device_bytes() -> None:
    def point(length: int, gib: int) -> dict[str, int]:
        return {"sequence_length": length, "device_bytes": gib * GIB, "scores_bytes": 0}

    curves = {"eager": [point(512, 4), point(1024, 16)], "sdpa": [point(512, 2), point(1024, 4)]}
    figure = attention_figure(curves, 80 * GIB, 1024, "GiB")
    assert {trace.name: tuple(trace.y) for trace in figure.data} == {
        "eager": (4, 16),
        "sdpa": (2, 4),
        "memory of one GPU": (80, 80),
    }
    assert list(figure.layout.xaxis.ticktext) == ["512", "1k"]
