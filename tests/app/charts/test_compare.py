"""A waterfall's bars follow one another from the baseline to the chosen plan."""

from __future__ import annotations

import pytest

from app.charts.compare import waterfall_figure
from app.charts.experiments import repeats_figure
from planner.difference import Measure, Waterfall
from planner.units import GIB_BYTES, format_bytes


def test_bars_begin_where_the_last_one_ended() -> None:
    moves = (("activations", -3 * GIB_BYTES), ("gathered", GIB_BYTES))
    fall = Waterfall(measure=Measure.DEVICE, start=10 * GIB_BYTES, end=8 * GIB_BYTES, moves=moves)
    figure = waterfall_figure(fall, ("A", "B"), GIB_BYTES, "GiB", format_bytes)
    totals, more, less, words = figure.data
    assert list(totals.y) == ["A", "B"]
    assert list(totals.x) == pytest.approx([10, 8])
    assert (list(less.y), list(less.base), list(less.x)) == (["activations"], [10], [-3])
    assert (list(more.y), list(more.base), list(more.x)) == (["gathered"], [7], [1])
    # Each text stands at the right end of its bar.
    assert list(words.x) == pytest.approx([10, 10, 8, 8])
    assert [text.strip() for text in words.text] == [
        *("10.00 GiB", "−3.00 GiB", "+1.00 GiB", "8.00 GiB")
    ]


def test_repeats_are_dots_with_their_range_and_median() -> None:
    points = [
        {"group": "1", "value": value, "text": "", "is_here": here, "is_throttled": slowed}
        for value, here, slowed in ((4.0, True, False), (1.0, False, False), (2.0, True, True))
    ]
    ranges, medians, here, here_slowed, elsewhere = repeats_figure(points, "ms").data
    assert (list(ranges.base), list(ranges.x)) == ([1.0], [3.0])
    assert list(medians.x) == [2.0]
    assert (here.marker.symbol, elsewhere.marker.symbol) == ("square", "circle")
    assert (list(here.x), list(here_slowed.x), list(elsewhere.x)) == ([4.0], [2.0], [1.0])
    assert here.marker.color != here_slowed.marker.color
