"""A step's timeline as table rows, alone or beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Sections = Sequence[Mapping[str, Any]]


def timeline_rows(sections: Sections) -> list[dict[str, Any]]:
    """Return every section with its high point, end and segments in bytes, and its parts."""
    return [
        {
            "section": section["words"],
            "high_bytes": section["high_bytes"],
            "end_bytes": section["end_bytes"],
            "reserved_bytes": section["reserved_bytes"],
            **{f"{name}_bytes": size for name, size in section["high_parts"].items()},
        }
        for section in sections
    ]


def difference_rows(sections: Sections, measured: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return predicted, measured and predicted less measured bytes of every section both have.

    Rows of `measured` are [label, allocated at end, peak in it].
    """
    seen = {str(label): (end, high) for label, end, high in measured}
    rows = []
    for section in sections:
        if section["label"] in seen:
            end_bytes, high_bytes = seen[section["label"]]
            rows.append(
                {
                    "section": section["words"],
                    "predicted_high_bytes": section["high_bytes"],
                    "measured_high_bytes": high_bytes,
                    "high_difference_bytes": section["high_bytes"] - high_bytes,
                    "predicted_end_bytes": section["end_bytes"],
                    "measured_end_bytes": end_bytes,
                    "end_difference_bytes": section["end_bytes"] - end_bytes,
                }
            )
    return rows


def largest_difference(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the section whose high points are furthest apart; None without any."""
    return max(rows, key=lambda row: abs(row["high_difference_bytes"]), default=None)
