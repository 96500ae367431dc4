"""How much of a profiled step each part takes, and what an optimisation of it could bring at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.time_parts import DEVICE_PARTS, PART_WORDS, Part
from planner.units import format_count, format_seconds

# What a change of attention does, by the most that it can bring.
_HELPS = ((1.1, "will not help"), (1.25, "helps little"), (float("inf"), "helps"))
METHOD = (
    "A part made free saves at most the time in which it alone runs: what overlaps with other work "
    "saves nothing (Amdahl's law on the device's own timeline). The bound is T / (T - alone), at "
    "twice the speed T / (T - alone / 2); T is the step with its data in series."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work of one part on the device, from `start_s` to `end_s`; one that goes on with a call has 0."""

    part: Part
    start_s: float
    end_s: float
    calls: int = 1


def account(spans: Sequence[Span]) -> dict[str, Any]:
    """Return `busy_s`, how long anything ran, `shared_s`, several parts at once, and `parts`.

    Of each part: `calls`, `time_s` (its spans' union), and `alone_s`, while no other part ran.
    """
    edges = sorted(
        [(span.start_s, 1, span.part) for span in spans]
        + [(span.end_s, -1, span.part) for span in spans],
        key=lambda edge: edge[:2],
    )
    running = dict.fromkeys(Part, 0)
    parts = {part: {"calls": 0, "time_s": 0.0, "alone_s": 0.0} for part in Part}
    busy_s = shared_s = reached_s = 0.0
    for moment_s, change, part in edges:
        active = [one for one, number in running.items() if number > 0]
        passed_s = moment_s - reached_s if active else 0.0
        for one in active:
            parts[one]["time_s"] += passed_s
        if len(active) == 1:
            parts[active[0]]["alone_s"] += passed_s
        busy_s += passed_s
        shared_s += passed_s if len(active) > 1 else 0.0
        reached_s = moment_s
        running[part] += change
    for span in spans:
        parts[span.part]["calls"] += span.calls
    seen = {str(part): found for part, found in parts.items() if found["time_s"]}
    return {"busy_s": busy_s, "shared_s": shared_s, "parts": seen}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """A part of a step: its time, the time it has alone, and the most that its removal brings."""

    part: Part
    time_s: float
    alone_s: float
    share: float
    speedup: float
    halved: float

    @property
    def words(self) -> str:
        """Say the most in one sentence."""
        return f"{PART_WORDS[self.part]} made free: {self.speedup:.2f}x at most."


def whole_s(measured: Mapping[str, Any]) -> float:
    """Return a profiled step's time with the data in series."""
    seconds: float = measured["base_s"] + measured["data"]["time_s"]
    return seconds


def ceilings(measured: Mapping[str, Any]) -> list[Ceiling]:
    """Return every part of a profiled step, the longest alone first."""
    total_s, data_s = whole_s(measured), measured["data"]["time_s"]
    rows = [
        (Part(name), seen["time_s"], seen["alone_s"]) for name, seen in measured["parts"].items()
    ]
    rows = [row for row in rows if row[0] in DEVICE_PARTS]
    host_s = measured["host_s"]
    rows += [(Part.HOST, host_s, host_s)] if host_s else []
    rows += [(Part.DATA, data_s, data_s)] if data_s else []
    found = [_ceiling(part, time_s, alone_s, total_s) for part, time_s, alone_s in rows]
    return sorted(found, key=lambda one: -one.alone_s)


def _ceiling(part: Part, time_s: float, alone_s: float, total_s: float) -> Ceiling:
    return Ceiling(
        part=part,
        time_s=time_s,
        alone_s=alone_s,
        share=alone_s / total_s,
        speedup=_without(alone_s, total_s),
        halved=_without(alone_s / 2, total_s),
    )


def _without(saved_s: float, total_s: float) -> float:
    return total_s / max(total_s - saved_s, 1e-12)


_PLACES: Mapping[Part, str] = {
    Part.HOST: "waiting for the host, its launches and its waits",
    Part.DATA: "reading and tokenizing the data",
    Part.COMMUNICATION: "the network, in collectives that nothing hides",
    Part.OPTIMIZER: "the optimizer's update",
}
_HOST_OF_A_CPU = "Python and the framework around the operations"
_INSTEAD: Mapping[Part, str] = {
    Part.HOST: "Larger batches, CUDA graphs or torch.compile shorten that.",
    Part.DATA: "Tokenize ahead, or in more processes beside the step.",
    Part.COMMUNICATION: "A lower stage, or more work per step, hides or saves sending.",
    Part.OPTIMIZER: "A fused or sharded optimizer, or more accumulation, shortens that.",
}


def verdict_sentence(measured: Mapping[str, Any]) -> str:
    """Say where most of the step goes, and what changing attention can bring."""
    found = {one.part: one for one in ceilings(measured)}
    if not found:
        return "Nothing ran on the device."
    first = next(iter(found.values()))
    place = _PLACES.get(first.part, PART_WORDS[first.part].lower())
    if first.part is Part.HOST and measured["clock"] == "cpu":
        place = _HOST_OF_A_CPU
    where = f"Most of the time, {100 * first.share:.0f} %, goes to {place}"
    attention = found.get(Part.ATTENTION)
    if attention is None:
        return f"{where}. No attention ran that could be changed."
    most = f"made free it brings {attention.speedup:.2f}x at most"
    if attention is first:
        return f"{where}: {most}."
    helps = next(word for bound, word in _HELPS if attention.speedup < bound)
    instead = _INSTEAD.get(first.part, "")
    return f"{where}. Changing attention {helps}: {most}. {instead}".rstrip()


PROFILE_COLUMNS = ("part", "calls", "time", "alone", "share", "made free", "twice as fast")


def profile_cells(measured: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return PROFILE_COLUMNS of a profile, the longest part first."""
    calls = {name: seen["calls"] for name, seen in measured["parts"].items()}
    return [
        (
            PART_WORDS[one.part],
            f"{calls[str(one.part)]:,}" if str(one.part) in calls else "-",
            format_seconds(one.time_s),
            format_seconds(one.alone_s),
            f"{100 * one.share:.1f} %",
            f"{one.speedup:.2f}x",
            f"{one.halved:.2f}x",
        )
        for one in ceilings(measured)
    ]


def profile_headline(measured: Mapping[str, Any]) -> str:
    """Return in one line what was profiled, how long it takes and how it was seen."""
    what = "training step" if measured["work"] == "training" else "batch of requests"
    return (
        f"A {what} of {format_seconds(measured['step_time_s'])}, median of "
        f"{measured['step_time_statistics']['n']} without the profiler; split by one more under it "
        f"({format_seconds(measured['traced_time_s'])}), by {measured['kernels_seen']:,} "
        + ("GPU kernels and copies" if measured["clock"] == "gpu" else "CPU operations")
    )


def method_notes(measured: Mapping[str, Any]) -> list[str]:
    """Return how the figures of a profile were made, and what they are not."""
    notes = [METHOD]
    if measured["clock"] == "cpu":
        notes.append(
            "Seen on a CPU: shares of the step under the profiler, which slows it; a GPU's are others."
        )
    else:
        notes.append(
            "Kernel times are those under the profiler; T is the step without it, and what the GPU did "
            "nothing in is the host's gaps."
        )
    if not measured["world_moves_data"]:
        notes.append(
            "World solo: nothing is sent between ranks, so communication takes no time here."
        )
    if measured["data"]["tokenizer"] is None:
        notes.append("No tokenizer was named, so tokens were there before the step.")
    else:
        notes.append(
            f"The tokenizer {measured['data']['tokenizer']} makes "
            f"{format_count(measured['data']['tokens_per_s'])} tokens/s in one process, counted in "
            "series with the step."
        )
    unknown = [row for row in measured["kernels"] if row[1] == Part.OTHER]
    if unknown:
        names = ", ".join(row[0][:60] for row in unknown[:5])
        notes.append(f"Names that no rule knows count as other: {names}.")
    return notes
