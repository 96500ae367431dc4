"""How far predictions of plans like one have been off, and the interval that follows for the next.

`data/error_history.json` is written with docs/accuracy.md from the recorded rows (calibration rows
left out), so that a page needs no recorded row to judge a plan. For each group it holds bounds on
measured / predicted device bytes (reserved bytes where a world does not count device bytes).

The bounds are order statistics: if n earlier ratios and the next one come in any order alike, the
next lies at or below the k-th smallest with probability k / (n + 1). The k for 95 % (and for 5 %
below) exists from 19 ratios on. A smaller group takes its extremes and never less than the bounds of
the next larger group, so that a short history is not mistaken for a good one. A plan with a trait
that was never measured (an engine, an architecture, an optimizer ...) gets the extremes of all.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

SCHEMA = 1
TAIL = 0.05
ALL = "all"
# Bounds of every ratio seen, for a plan unlike all that were measured.
EXTREMES = "extremes"
# A plan with a value of one of these that no measurement had is unlike them.
MEASURED_TRAITS = (
    *("engine", "attention", "architecture", "checkpointing", "precision"),
    *("optimizer", "loss", "LoRA", "accumulation", "variant"),
)
_DECIMALS = 5
# Fewer ratios have no order statistic at TAIL.
_ENOUGH = round(1 / TAIL) - 1


@dataclass(frozen=True, slots=True)
class Ratios:
    """Bounds on measured / predicted bytes; `low` and `high` may be arrays."""

    low: Any
    high: Any
    measurements: int
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the measurement will lie, in bytes, how many earlier ones say so, and of what."""

    low_bytes: int
    high_bytes: int
    measurements: int
    basis: str


def group_names(traits: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the groups of a plan, the nearest first."""
    engine, stage, attention = (traits[name] for name in ("engine", "stage", "attention"))
    return f"{engine}/{stage}/{attention}", engine, ALL


def history_table(plans: Iterable[tuple[Mapping[str, str], float]]) -> dict[str, Any]:
    """Return the table from the traits of measured plans and their measured / predicted."""
    ratios: dict[str, list[float]] = defaultdict(list)
    parents: dict[str, str | None] = {ALL: None}
    seen: dict[str, set[str]] = {name: set() for name in MEASURED_TRAITS}
    for traits, ratio in plans:
        for name in MEASURED_TRAITS:
            seen[name].add(traits[name])
        nearest, engine, everything = group_names(traits)
        parents |= {nearest: engine, engine: everything}
        for name in (nearest, engine, everything):
            ratios[name].append(ratio)
    found: dict[str, dict[str, Any]] = {}
    # Larger groups first: the smaller ones lean on them.
    for name in sorted(ratios, key=lambda name: (name != ALL, name.count("/"), name)):
        parent = parents[name]
        found[name] = _bounds(ratios[name], None if parent is None else found[parent])
    if ratios:
        every = ratios[ALL]
        found[EXTREMES] = _entry(len(every), min(every), max(every))
    return {
        "schema": SCHEMA,
        "tail": TAIL,
        "measured": {name: sorted(values) for name, values in seen.items()},
        "groups": dict(sorted(found.items())),
    }


def inside_without_itself(plans: Sequence[tuple[Mapping[str, str], float]]) -> int:
    """Return how many ratios lie inside the bounds that all the others give for their plan."""
    inside = 0
    for index, (traits, ratio) in enumerate(plans):
        others = history_table([*plans[:index], *plans[index + 1 :]])
        bounds = ratios_for(traits, others)
        if bounds is not None:
            # The bounds are rounded, and so must be what is compared with them.
            inside += bounds.low <= round(ratio, _DECIMALS) <= bounds.high
    return inside


def _bounds(ratios: list[float], parent: Mapping[str, Any] | None) -> dict[str, Any]:
    ordered, n = sorted(ratios), len(ratios)
    if n >= _ENOUGH:
        lowest = math.floor(TAIL * (n + 1))
        return _entry(n, ordered[lowest - 1], ordered[n - lowest])
    low, high = ordered[0], ordered[-1]
    if parent is not None:
        low, high = min(low, parent["low"]), max(high, parent["high"])
    return _entry(n, low, high)


def _entry(n: int, low: float, high: float) -> dict[str, Any]:
    """One group; the prediction itself is never outside its own interval."""
    low, high = min(low, 1.0), max(high, 1.0)
    return {"n": n, "low": round(low, _DECIMALS), "high": round(high, _DECIMALS)}


@cache
def _history() -> Mapping[str, Any]:
    text = files("planner").joinpath("data/error_history.json").read_text()
    history: Mapping[str, Any] = json.loads(text)
    return history


def forget_history() -> None:
    """Read the table anew at the next question: the script that writes it has to."""
    _history.cache_clear()


def ratios_for(
    traits: Mapping[str, str], history: Mapping[str, Any] | None = None
) -> Ratios | None:
    """Return the bounds for a plan of these traits; None without any measurement at all.

    `history` is a table of `history_table`, the committed one unless given.
    """
    history = _history() if history is None else history
    groups = history["groups"]
    if not groups:
        return None
    for name in MEASURED_TRAITS:
        if traits[name] not in history["measured"][name]:
            return _ratios(groups[EXTREMES], f"all plans, none of them with {name} {traits[name]}")
    nearest, engine, _ = group_names(traits)
    like_it, of_engine = (groups.get(key, {"n": 0})["n"] for key in (nearest, engine))
    found = groups[nearest] if like_it else groups[engine]
    if like_it >= _ENOUGH:
        return _ratios(found, f"plans like it ({_group_words(nearest)})")
    if of_engine >= _ENOUGH:
        basis = f"plans of its engine ({engine}), {like_it} of them like it"
        return _ratios(found, basis, of_engine)
    return _ratios(found, f"all plans, {of_engine} of them of its engine", groups[ALL]["n"])


def _group_words(nearest: str) -> str:
    engine, stage, attention = nearest.split("/")
    return f"{engine} ZeRO-{stage}, {attention}"


def _ratios(found: Mapping[str, Any], basis: str, measurements: int | None = None) -> Ratios:
    return Ratios(found["low"], found["high"], measurements or found["n"], basis)


def ratios_by_stage(
    traits: Mapping[str, str], stages: Iterable[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Return the low and high bounds for each stage, or None without any measurement."""
    found = [ratios_for({**traits, "stage": str(stage)}) for stage in stages]
    known = [ratios for ratios in found if ratios is not None]
    if len(known) < len(found):
        return None
    return np.array([r.low for r in known]), np.array([r.high for r in known])


def interval_around(
    needed_bytes: int, traits: Mapping[str, str], doubt_bytes: int
) -> Interval | None:
    """Return where the measurement of a prediction will lie; None without any history.

    `doubt_bytes` widens it to both sides: what the GPU or the ranks leave open, in no measurement.
    """
    ratios = ratios_for(traits)
    if ratios is None:
        return None
    return Interval(
        low_bytes=max(0, math.floor(needed_bytes * ratios.low) - doubt_bytes),
        high_bytes=math.ceil(needed_bytes * ratios.high) + doubt_bytes,
        measurements=ratios.measurements,
        basis=ratios.basis,
    )
