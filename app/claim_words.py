"""Claims in words: values in their unit, what a text claims, how a measurement is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.units import format_bytes, format_gb

RECORDED, HERE = "recorded", "measured here"
NOT_MEASURED = "not measured"


def value_text(value: float, unit: str, sizes: str = "GiB") -> str:
    """Return a claim's value as people read it; `sizes` is what they read bytes in, GiB or GB."""
    if unit == "bytes":
        return format_gb(value) if sizes == "GB" else format_bytes(value)
    if unit == "share":
        number = f"{100 * value:,.2f}".rstrip("0").rstrip(".")
        return f"{number} %".replace("-", "−")
    if unit == "tokens":
        return f"{value:,.0f} tokens"
    return f"{value:,.3g}×" if value < 1000 else f"{value:,.0f}×"


def claimed_text(claim: Mapping[str, Any], sizes: str = "GiB") -> str:
    """Return what agrees with a claim: a value, a range, or an end of one."""
    low, high = claim["claimed"]["low"], claim["claimed"]["high"]
    unit = claim["unit"]
    ends = [None if end is None else value_text(end, unit, sizes) for end in (low, high)]
    if low is None:
        return f"at most {ends[1]}"
    if high is None:
        return f"at least {ends[0]}"
    return str(ends[0]) if low == high else f"{ends[0]} to {ends[1]}"


def range_text(found: Sequence[Mapping[str, Any]], unit: str, sizes: str = "GiB") -> str:
    """Return the span of several values; "not measured" where there are none."""
    if not found:
        return NOT_MEASURED
    values = [one["value"] for one in found]
    low, high = (value_text(end, unit, sizes) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def computed_text(claim: Mapping[str, Any], sizes: str = "GiB") -> str:
    """Return the span of what is computed for the claim's own cases."""
    cases = [one for one in claim["computed"] if not one["own_plan"]]
    return range_text(cases, claim["unit"], sizes)


def verdict_sentence(claim: Mapping[str, Any]) -> str:
    """Return the verdict with its reason: "Holds only when the model has 4,096 tokens." """
    verdict, because = claim["verdict"], claim["because"]
    joint = " " if verdict == "holds only when" else ": "
    return f"{verdict.capitalize()}{joint}{because}."


def seen_text(seen: Mapping[str, Any]) -> str:
    """Return where a measurement is from: rows, GPU, world, and whether it was made here."""
    place = HERE if seen["here"] else RECORDED
    rows = ", ".join(seen["rows"])
    return f"{seen['gpu']}, {seen['world']}, {place}: {rows}"
