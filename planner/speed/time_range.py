"""Where the time of a step will lie: as far from its prediction as recorded steps lay from theirs.

What the GPU computes is predicted kernel by kernel; a host that starts kernels takes as long as its
other work lets it. So steps are told apart by what sets their pace. `data/time_history.json` is
written with docs/throughput.md from recorded whole steps of one and two GPUs, calibration left out.
Its bounds are order statistics of measured / predicted, as those of bytes in `planner.error_history`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import floor
from typing import Any

from planner.units import format_seconds

# Of further steps of a kind 5 % lie below the range and 5 % above.
TAIL = 0.05
# A host that needs less than this of the GPU's time is never waited for.
_FAR_AHEAD = 0.6
PACES = {
    "gpu": "whose GPU sets the pace",
    "both": "whose host needs nearly as long as their GPU",
    "host": "whose GPU waits for the host",
}
_DECIMALS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """From where to where a step's time lies, and how many measured steps of what kind say so."""

    low_s: float
    high_s: float
    measurements: int
    basis: str

    def sentence(self) -> str:
        """Say the range and what it rests on."""
        ends = f"{format_seconds(self.low_s)} and {format_seconds(self.high_s)}"
        return (
            f"Nine in ten steps like this one take between {ends}, as {self.measurements} measured "
            f"on one and two H200s say {self.basis}."
        )


def pace_of(gpu_s: float, host_s: float) -> str:
    """Return what sets the pace of a step, a key of `PACES`."""
    if host_s > gpu_s:
        return "host"
    return "gpu" if host_s < _FAR_AHEAD * gpu_s else "both"


def range_around(step_s: float, gpu_s: float, host_s: float) -> TimeRange | None:
    """Return the range of a step of an H200; None where too few steps like it were measured."""
    pace = pace_of(gpu_s, host_s)
    bounds = _history().get(pace)
    if bounds is None:
        return None
    low, high = float(bounds["low"]), float(bounds["high"])
    return TimeRange(
        low_s=step_s * low, high_s=step_s * high, measurements=bounds["n"], basis=PACES[pace]
    )


@cache
def _history() -> Mapping[str, Any]:
    text = files("planner").joinpath("data/time_history.json").read_text()
    history: Mapping[str, Any] = json.loads(text)
    return history


def history_table(steps: Iterable[tuple[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the bounds by pace, from each step's pace and measured / predicted."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for pace, ratio in steps:
        ratios[pace].append(ratio)
    return {pace: bounds for pace in PACES if (bounds := _bounds(ratios[pace])) is not None}


def _bounds(ratios: Sequence[float]) -> dict[str, Any] | None:
    """The k-th smallest and largest ratio, for k / (n + 1) at most TAIL; None where k is 0."""
    ordered, n = sorted(ratios), len(ratios)
    lowest = floor(TAIL * (n + 1))
    if lowest == 0:
        return None
    low, high = ordered[lowest - 1], ordered[n - lowest]
    return {"n": n, "low": round(low, _DECIMALS), "high": round(high, _DECIMALS)}


def inside_without_itself(steps: Sequence[tuple[str, float]]) -> dict[str, tuple[int, int]]:
    """Return by pace how many ratios lie inside the bounds that all the others give, of how many."""
    found = {pace: [0, 0] for pace in PACES}
    for index, (pace, ratio) in enumerate(steps):
        bounds = history_table([*steps[:index], *steps[index + 1 :]]).get(pace)
        if bounds is not None:
            found[pace][0] += bounds["low"] <= round(ratio, _DECIMALS) <= bounds["high"]
            found[pace][1] += 1
    return {pace: (inside, n) for pace, (inside, n) in found.items()}
