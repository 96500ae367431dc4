"""The treemap: areas add up, nothing without bytes is drawn."""

from __future__ import annotations

from typing import Any

from app.charts.ledger import MAX_TILES, treemap_figure


def entry(name: str, component: str, size_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "component": component,
        "bytes": size_bytes,
        "shape_text": "2 × 3",
        "dtype": "float32",
        "count": 1,
        "formula": "a formula",
    }


def tiles(entries: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    (trace,) = treemap_figure(entries, "GiB").data
    return {
        id_: (parent, value)
        for id_, parent, value in zip(trace.ids, trace.parents, trace.values, strict=True)
    }


def test_components_hold_their_tensors_and_the_whole_holds_the_components() -> None:
    found = tiles(
        [
            entry("a", "logits", 5),
            entry("b", "parameters", 3),
            entry("c", "logits", 2),
            entry("less", "activations", -4),
        ]
    )
    assert found["peak"] == ("", 10)
    assert found["logits"] == ("peak", 7) and found["parameters"] == ("peak", 3)
    assert "activations" not in found
    leaves = [value for parent, value in found.values() if parent == "logits"]
    assert sorted(leaves) == [2, 5]


def test_what_is_too_small_to_see_is_one_tile_and_areas_still_add_up() -> None:
    many = [entry(f"t{i}", "activations", 1000 - i) for i in range(MAX_TILES + 40)]
    found = tiles(many)
    leaves = [value for parent, value in found.values() if parent == "activations"]
    assert len(leaves) == MAX_TILES + 1
    assert sum(leaves) == found["activations"][1] == sum(e["bytes"] for e in many)
