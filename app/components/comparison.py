"""Which predicted number stands beside which measured number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.accuracy import compare


def comparison_rows(
    prediction: Mapping[str, Any] | None, measured: Mapping[str, Any], world: str
) -> list[dict[str, Any]]:
    """Return label, predicted and measured bytes of what this world is honest for."""
    if prediction is None:
        return []
    return [
        {
            "label": found.quantity,
            "predicted_bytes": int(found.predicted),
            "measured_bytes": int(found.measured),
        }
        for found in compare(prediction, measured, world)
        if found.quantity != "step_time"
    ]


def phase_rows(
    prediction: Mapping[str, Any] | None, measured: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the allocated peak of every phase that both sides name."""
    seen = measured.get("phases") or {}
    if prediction is None or not seen:
        return []
    peaks = {name: _peak_bytes(value) for name, value in _named(seen)}
    return [
        {
            "label": phase["label"],
            "predicted_bytes": phase["allocated_bytes"],
            "measured_bytes": peaks[phase["name"]],
        }
        for phase in prediction["memory"]["phases"]
        if peaks.get(phase["name"])
    ]


def _named(phases: Any) -> list[tuple[str, Any]]:
    if isinstance(phases, Mapping):
        return list(phases.items())
    return [(phase["name"], phase) for phase in phases]


def _peak_bytes(value: Any) -> int | None:
    return value.get("allocated_bytes") if isinstance(value, Mapping) else value
