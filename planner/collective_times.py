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
        calls = _calls(ranks, name)
        found[name] = sum(map(min, zip(*calls, strict=True))) if calls else _smallest(ranks, name)
    return found


def are_calls_apart(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every call's time is known on every rank, so that no rank's waiting is in their sum."""
    names = ranks[0]["collectives"] if ranks else ()
    return bool(names) and all(_calls(ranks, name) for name in names)


def _calls(ranks: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """Each rank's times of one collective's calls; nothing where ranks do not tell as many."""
    seen = [rank["collectives"].get(name, {}).get("times_s") or [] for rank in ranks]
    return seen if len({len(times) for times in seen}) == 1 and seen[0] else []


def _smallest(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    seen = [rank["collectives"][name] for rank in ranks if name in rank["collectives"]]
    return min(float(one["time_s"]) for one in seen)
