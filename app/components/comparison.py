"""Which predicted number stands beside which measured number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.comparison import TIME_QUANTITIES, compare


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
        if found.quantity not in TIME_QUANTITIES
    ]


# What the job measures as one phase, by the planner's finer phases that lie in it.
MEASURED_PHASES: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward", "loss_forward"),
    "backward": ("loss_backward", "backward"),
    "optimizer": ("optimizer",),
}


def phase_rows(
    prediction: Mapping[str, Any] | None, measured: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the allocated peak of every phase that both sides know; empty on the CPU."""
    if prediction is None:
        return []
    rows = []
    for name, beginnings in MEASURED_PHASES.items():
        seen = (measured.get("phases") or {}).get(name)
        predicted_bytes = _largest_bytes(prediction["memory"]["phases"], beginnings)
        if seen and predicted_bytes is not None:
            rows.append(
                {
                    "label": name,
                    "predicted_bytes": predicted_bytes,
                    "measured_bytes": seen["peak_allocated_bytes"],
                }
            )
    return rows


def _largest_bytes(phases: Sequence[Mapping[str, Any]], beginnings: tuple[str, ...]) -> int | None:
    """Largest allocated bytes of the phases whose name begins with one of `beginnings`."""
    sizes = [
        phase["allocated_bytes"] for phase in phases if str(phase["name"]).startswith(beginnings)
    ]
    return max(sizes, default=None)
