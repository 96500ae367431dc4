"""Predicted and measured sections, side by side."""

from __future__ import annotations

from app.timeline_rows import difference_rows, largest_difference, timeline_rows

SECTIONS = [
    {
        "label": "embed",
        "words": "embedding",
        "high_bytes": 100,
        "end_bytes": 90,
        "high_parts": {"parameters": 90, "temporary": 10},
        "end_parts": {"parameters": 90},
        "reserved_bytes": 128,
    },
    {
        "label": "layer 0",
        "words": "layer 0",
        "high_bytes": 150,
        "end_bytes": 120,
        "high_parts": {"parameters": 90, "activations": 60},
        "end_parts": {"parameters": 90, "activations": 30},
        "reserved_bytes": 160,
    },
]


def test_a_row_has_its_parts_at_the_high_point() -> None:
    row = timeline_rows(SECTIONS)[1]
    assert row["activations_bytes"] == 60
    assert (row["high_bytes"], row["end_bytes"], row["reserved_bytes"]) == (150, 120, 160)


def test_differences_are_of_the_sections_that_both_have() -> None:
    rows = difference_rows(SECTIONS, [["layer 0", 121, 140], ["layer 7", 1, 1]])
    assert [row["section"] for row in rows] == ["layer 0"]
    assert rows[0]["high_difference_bytes"] == 10
    assert rows[0]["end_difference_bytes"] == -1
    assert largest_difference(rows) == rows[0]


def test_nothing_measured_has_no_difference() -> None:
    assert difference_rows(SECTIONS, []) == []
    assert largest_difference([]) is None
