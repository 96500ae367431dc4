"""Does it fit: needed bytes against the memory that CUDA shows, with the headroom left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.error_history import Interval
from planner.units import format_bytes, format_share
from planner.workload import flat_dict

# Where no measurement says how far a prediction may be off: fragmentation alone reaches 9 % of
# allocated bytes in published measurements (SimuMax 1.2, reserved / allocated 1.03-1.09).
COMFORTABLE_HEADROOM = 0.08
# Where the interval ends below the capacity: room for what a machine in use holds beside the job.
SMALL_HEADROOM = 0.02


class State(StrEnum):
    """Whether a plan runs in the memory at hand."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer for the worst rank; `headroom_bytes` is negative where memory is short.

    From `low_bytes` to `high_bytes` reach `measurements` of earlier plans, described by `basis`;
    all four are None where nothing like the plan was measured.
    """

    state: State
    capacity_bytes: int
    needed_bytes: int
    headroom_bytes: int
    headroom_fraction: float
    low_bytes: int | None
    high_bytes: int | None
    measurements: int | None
    basis: str | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return flat_dict(self)


def verdict_sentence(
    state: str,
    needed_bytes: int,
    capacity_bytes: int,
    interval: Interval | None = None,
    show: Callable[[int], str] = format_bytes,
) -> str:
    """Return the verdict in words, with sizes as `show` writes them."""
    sizes = f"{show(needed_bytes)} of {show(capacity_bytes)} per GPU"
    left = f"{format_share(1 - needed_bytes / capacity_bytes)} left"
    if needed_bytes > capacity_bytes:
        left = f"{show(needed_bytes - capacity_bytes)} too much"
    words = {State.FITS: "Fits", State.TIGHT: "Tight", State.DOES_NOT_FIT: "Does not fit"}
    answer = f"{words[State(state)]}: needs {sizes}, {left}"
    return f"{answer}." if interval is None else f"{answer}; {interval_sentence(interval, show)}."


def interval_sentence(interval: Interval, show: Callable[[int], str] = format_bytes) -> str:
    """Return the interval in words: from where to where, and what it rests on."""
    ends = f"between {show(interval.low_bytes)} and {show(interval.high_bytes)}"
    number = interval.measurements
    return f"{ends}, from {number} measurement{'' if number == 1 else 's'} of {interval.basis}"


def decide(
    needed_bytes: int, capacity_bytes: int, low_bytes: int | None, high_bytes: int | None
) -> State:
    """Return the state of one plan; without an interval the headroom alone decides."""
    if low_bytes is None or high_bytes is None:
        comfortable, impossible = COMFORTABLE_HEADROOM, needed_bytes > capacity_bytes
    else:
        comfortable, impossible = SMALL_HEADROOM, low_bytes > capacity_bytes
    if impossible:
        return State.DOES_NOT_FIT
    has_room = needed_bytes <= capacity_bytes * (1 - comfortable)
    reaches = high_bytes is not None and high_bytes > capacity_bytes
    return State.FITS if has_room and not reaches else State.TIGHT


def judge(needed_bytes: int, capacity_bytes: int, interval: Interval | None = None) -> Verdict:
    """Compare needed with available device bytes.

    Below the capacity with the whole interval and 2 % to spare fits; above it with the whole
    interval does not fit; tight is between. Without an interval, 8 % must be left to fit.
    """
    ends = (interval.low_bytes, interval.high_bytes) if interval is not None else (None, None)
    state = decide(needed_bytes, capacity_bytes, *ends)
    return Verdict(
        state=state,
        capacity_bytes=capacity_bytes,
        needed_bytes=needed_bytes,
        headroom_bytes=capacity_bytes - needed_bytes,
        headroom_fraction=(capacity_bytes - needed_bytes) / capacity_bytes,
        low_bytes=ends[0],
        high_bytes=ends[1],
        measurements=interval.measurements if interval is not None else None,
        basis=interval.basis if interval is not None else None,
        sentence=verdict_sentence(state, needed_bytes, capacity_bytes, interval),
    )


def judge_grid(
    needed_bytes: NDArray[Any],
    capacity_bytes: int,
    low_bytes: NDArray[Any] | None = None,
    high_bytes: NDArray[Any] | None = None,
) -> NDArray[np.str_]:
    """Return the state of every entry of an array of needed bytes, as text of the same shape."""
    has_interval = low_bytes is not None and high_bytes is not None
    headroom = SMALL_HEADROOM if has_interval else COMFORTABLE_HEADROOM
    lowest = low_bytes if low_bytes is not None else needed_bytes
    highest = high_bytes if high_bytes is not None else needed_bytes
    fits = (needed_bytes <= capacity_bytes * (1 - headroom)) & (highest <= capacity_bytes)
    codes = np.where(lowest > capacity_bytes, 2, np.where(fits, 0, 1))
    names: NDArray[np.str_] = np.array([str(state) for state in State])
    states: NDArray[np.str_] = names[codes]
    return states
