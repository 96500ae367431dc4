"""Does it fit: needed bytes against the memory that CUDA shows, with the headroom left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.units import format_bytes

# Below this share of free memory a run lives on the allocator's luck: fragmentation alone reaches
# 9 % of allocated bytes in published measurements (SimuMax 1.2, reserved / allocated 1.03-1.09).
COMFORTABLE_HEADROOM = 0.08


class State(StrEnum):
    """Whether a plan runs in the memory at hand."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer for the worst rank; `headroom_bytes` is negative where memory is short."""

    state: State
    capacity_bytes: int
    needed_bytes: int
    headroom_bytes: int
    headroom_fraction: float
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "state": str(self.state)}


def verdict_sentence(
    state: str,
    needed_bytes: int,
    capacity_bytes: int,
    show: Callable[[int], str] = format_bytes,
) -> str:
    """Return the verdict in words, with sizes as `show` writes them."""
    sizes = f"{show(needed_bytes)} of {show(capacity_bytes)} per GPU"
    if state == State.DOES_NOT_FIT:
        return f"Does not fit: needs {sizes}, {show(needed_bytes - capacity_bytes)} too much."
    word = "Fits" if state == State.FITS else "Tight"
    return f"{word}: needs {sizes}, {1 - needed_bytes / capacity_bytes:.1%} left."


def judge(needed_bytes: int, capacity_bytes: int) -> Verdict:
    """Compare needed with available device bytes: at least 8 % left fits, less is tight."""
    headroom_bytes = capacity_bytes - needed_bytes
    fraction = headroom_bytes / capacity_bytes
    if headroom_bytes < 0:
        state = State.DOES_NOT_FIT
    else:
        state = State.FITS if fraction >= COMFORTABLE_HEADROOM else State.TIGHT
    return Verdict(
        state=state,
        capacity_bytes=capacity_bytes,
        needed_bytes=needed_bytes,
        headroom_bytes=headroom_bytes,
        headroom_fraction=fraction,
        sentence=verdict_sentence(state, needed_bytes, capacity_bytes),
    )


def judge_grid(needed_bytes: NDArray[Any], capacity_bytes: int) -> NDArray[np.str_]:
    """Return the state of every entry of an array of needed bytes, as text of the same shape."""
    comfortable = needed_bytes <= capacity_bytes * (1 - COMFORTABLE_HEADROOM)
    codes = np.where(comfortable, 0, np.where(needed_bytes <= capacity_bytes, 1, 2))
    names: NDArray[np.str_] = np.array([str(state) for state in State])
    states: NDArray[np.str_] = names[codes]
    return states
