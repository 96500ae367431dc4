"""What a run says of the training that it went on from, and of the step that it saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.units import format_bytes, format_seconds


def saved_lines(measured: Mapping[str, Any]) -> list[str]:
    """Return a sentence each of the step a run loaded and the step it saved, if it did."""
    lines = []
    if loaded := measured.get("loaded"):
        lines.append(f"Went on from {_step(loaded)}: loaded in {format_seconds(loaded['time_s'])}.")
    if saved := measured.get("saved"):
        lines.append(f"Saved {_step(saved)}, in {format_seconds(saved['time_s'])}.")
    return lines


def _step(found: Mapping[str, Any]) -> str:
    ranks = "1 rank" if found["world_size"] == 1 else f"{found['world_size']} ranks"
    return (
        f"step {found['step']} of {ranks} at stage {found['zero_stage']}, "
        f"{format_bytes(found['bytes'])} in {found['path']}"
    )
