"""Under what conditions runs measured: environments that drifted, GPUs that were slowed down, worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.experiments.lines import FIGURES, Line

UNKNOWN = "unknown"
# What of an environment may change a figure, by where the record keeps it.
WATCHED: Mapping[str, tuple[str, ...]] = {
    "GPU": ("gpu", "name"),
    "driver": ("gpu", "driver"),
    "torch": ("versions", "torch"),
    "triton": ("versions", "triton"),
    "transformers": ("versions", "transformers"),
    "CUDA": ("versions", "cuda"),
    "cuDNN": ("versions", "cudnn"),
    "NCCL": ("versions", "nccl"),
    "peakmark": ("versions", "peakmark"),
    "source": ("source", "git_sha"),
    "Python": ("python",),
    "host": ("host",),
    "power limit": ("gpu", "power_limit_mw"),
}
# The reasons that the driver gives for lower clocks, in words; runs note those at their end.
REASONS: Mapping[str, str] = {
    "sw_power_cap": "at its power limit",
    "hw_slowdown": "slowed by the hardware",
    "sw_thermal": "too warm",
    "hw_thermal": "too hot, slowed by the hardware",
    "hw_power_brake": "power brake",
}
_SHORT_SHA = 9
_MILLI = 1000


def watched(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return what of an environment may change a figure, as text; "unknown" where it was not noted."""
    return {name: _text(name, environment, path) for name, path in WATCHED.items()}


def _text(name: str, environment: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = environment
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        # Without a GPU there is none to name; what else is missing was not noted.
        no_gpu = environment and path[0] == "gpu" and environment.get("gpu") is None
        return "none" if no_gpu else UNKNOWN
    if name == "source":
        source = environment["source"]
        return f"{str(value)[:_SHORT_SHA]}{', changed' if source.get('dirty') else ''}"
    return f"{value / _MILLI:g} W" if name == "power limit" else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A part of the environment that is not the same in all runs, with how many had each value."""

    name: str
    values: tuple[tuple[str, int], ...]

    def words(self) -> str:
        """Return it as text, such as "torch: 2.10.0 (3), 2.11.0 (1)"."""
        return f"{self.name}: {', '.join(f'{value} ({count})' for value, count in self.values)}"


def drifts(lines: Sequence[Line]) -> list[Drift]:
    """Return what differs between the environments of finished runs."""
    seen = {line.run.id: watched(line.run.environment) for line in lines if line.run.environment}
    found = []
    for name in WATCHED:
        counts: dict[str, int] = {}
        for environment in seen.values():
            counts[environment[name]] = counts.get(environment[name], 0) + 1
        if len(counts) > 1:
            found.append(Drift(name=name, values=tuple(sorted(counts.items()))))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """What the GPU's clock was as a run ended, and the driver's reasons if it was lowered."""

    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    reasons: tuple[str, ...]

    @property
    def is_throttled(self) -> bool:
        """Whether the driver named a reason for a lower clock."""
        return bool(self.reasons)

    def words(self) -> str:
        """Return the clocks as text; empty where none were noted."""
        if self.sm_clock_mhz is None:
            return ""
        of = f" of {self.max_sm_clock_mhz:,}" if self.max_sm_clock_mhz else ""
        why = ", ".join(REASONS.get(reason, reason.replace("_", " ")) for reason in self.reasons)
        return f"{self.sm_clock_mhz:,}{of} MHz{f', {why}' if why else ''}"


def clocks_of(environment: Mapping[str, Any]) -> Clocks:
    """Return the clocks of a run's first GPU; nothing is known on the CPU."""
    gpu = environment.get("gpu")
    values = gpu if isinstance(gpu, Mapping) else {}
    return Clocks(
        sm_clock_mhz=values.get("sm_clock_mhz"),
        max_sm_clock_mhz=values.get("max_sm_clock_mhz"),
        reasons=tuple(values.get("throttle_reasons") or ()),
    )


def cautions(baseline: Sequence[Line], other: Sequence[Line], figure: str) -> list[str]:
    """Return what besides its variables may have made a difference between two groups, in words."""
    both = [*baseline, *other]
    found = [f"the environment differs ({drift.words()})" for drift in drifts(both)]
    slowed = [_slowed(lines) for lines in (baseline, other)]
    is_time = FIGURES[figure].unit in ("s", "per_s")
    if is_time and any(slowed):
        found.append(
            f"GPUs with lowered clocks in {slowed[1]} of {len(other)} runs here and {slowed[0]} of "
            f"{len(baseline)} of the baseline"
        )
    return [*found, *(_dishonest(both) if is_time else [])]


def _slowed(lines: Sequence[Line]) -> int:
    return sum(clocks_of(line.run.environment).is_throttled for line in lines)


def _dishonest(lines: Sequence[Line]) -> list[str]:
    """Say which worlds are not honest for time."""
    worlds = {str(line.variables.get("world")) for line in lines}
    alone = any(
        line.variables.get("world") == "solo" and (line.variables.get("ranks") or 1) > 1
        for line in lines
    )
    found = []
    if worlds & {"cpu", "shared"}:
        named = " and ".join(sorted(worlds & {"cpu", "shared"}))
        found.append(f"times in the world {named} are not those of a GPU per rank")
    if alone:
        found.append("a rank alone (solo) waits for no other: its time is without communication")
    return found
