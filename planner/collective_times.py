"""How long a step's collectives took, out of what each rank's trace of it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def collective_times_s(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the time of each collective in a step; `ranks` holds each rank's `kernel_times`.

    A rank's kernel begins when that rank does and waits for the others, so of every call the
    shortest counts: that of the rank which came last. Where calls were not kept apart, the
    smallest sum of a rank.
    """
    if not ranks:
        return {}
    found = {}
    for name in ranks[0]["collectives"]:
        seen = [rank["collectives"][name] for rank in ranks if name in rank["collectives"]]
        calls = [one.get("times_s") for one in seen]
        if all(calls) and len({len(times) for times in calls if times}) == 1:
            found[name] = sum(map(min, zip(*(times for times in calls if times), strict=True)))
        else:
            found[name] = min(float(one["time_s"]) for one in seen)
    return found
