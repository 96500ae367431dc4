"""A simulation in words, the same on pages and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.units import format_count, format_seconds


def simulated_headline(counted: Mapping[str, Any]) -> str:
    """Return in one line how many requests ended how, and how fast."""
    states = ", ".join(f"{number:,} {state}" for state, number in counted["states"].items())
    return (
        f"{states} in {format_seconds(counted['duration_s'])}: "
        f"{format_count(counted['tokens_per_s'])} tokens/s"
    )


def simulated_rest(counted: Mapping[str, Any]) -> str:
    """Return in one line what queue, rows and cache saw."""
    return (
        f"Queue {counted['mean_queue']:.2f} on average and {counted['most_waiting']:,} at most; "
        f"{counted['most_running']:,} at once; cache {100 * counted['mean_cache_share']:.0f} % full on "
        f"average and {100 * counted['most_cache_share']:.0f} % at most; {counted['preemptions']:,} "
        f"preemptions; {counted['steps']:,} steps; device busy {100 * counted['busy_share']:.0f} % of the time."
    )
