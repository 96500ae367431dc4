"""The runs of a search for a limit, as cells that page and command line show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TRIAL_COLUMNS = ("value", "ended", "predicted", "measured", "seconds")
_ENDINGS = {"done": "ran", "oom_device": "out of memory", "not_planned": "cannot be planned"}


def trial_cells(found: Mapping[str, Any], show: Callable[[int], str]) -> list[tuple[str, ...]]:
    """Return a row per run: device bytes of the worst GPU predicted and measured, as `show` writes them."""

    def size(value: int | None) -> str:
        return "-" if value is None else show(value)

    return [
        (
            f"{one['value']:,}",
            _ENDINGS[one["outcome"]],
            size(one["predicted_bytes"]),
            size(one["device_bytes"]),
            f"{one['seconds']:.0f}",
        )
        for one in found["trials"]
    ]
