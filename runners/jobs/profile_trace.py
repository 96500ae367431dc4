"""From a profiler's trace to spans of work, each with the part that it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.time_parts import OURS, Part, part_of_nested, part_of_work
from planner.time_shares import Span

MARK = "peakmark."
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_SECONDS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kernel, a copy, or an operation's own time on a CPU."""

    name: str
    phase: str | None
    span: Span


class Marks:
    """The phases that a run has marked, by their time on the host."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        found = [
            (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
            for event in events
            if event.get("cat") == "user_annotation" and str(event["name"]).startswith(MARK)
        ]
        self._marks = sorted(found)
        self._starts = [start for start, _, _ in self._marks]

    def at(self, moment: float) -> str | None:
        """Return the phase at a moment of the trace (microseconds)."""
        index = bisect_right(self._starts, moment) - 1
        if index < 0 or moment > self._marks[index][1]:
            return None
        return self._marks[index][2].removeprefix(MARK)


def gpu_work(events: Sequence[Mapping[str, Any]]) -> list[Work]:
    """Return what the GPU did, each kernel with the phase and the operation that launched it."""
    marks, chains = Marks(events), _chains(events)
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        given = event.get("args", {})
        start = float(event["ts"])
        phase = marks.at(launched.get(given.get("correlation"), start))
        name, chain = str(event["name"]), chains.get(_number(event) or -1, ())
        part = part_of_work(name, chain, phase)
        found.append(_work(name, phase, part, (start, start + float(event["dur"]))))
    return found


def _chains(events: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Return each operation's name behind those around it, by its number in the trace."""
    found: dict[int, tuple[str, ...]] = {}
    for operations in _by_thread(events).values():
        open_: list[tuple[float, str]] = []
        for event in operations:
            start = float(event["ts"])
            while open_ and open_[-1][0] <= start:
                open_.pop()
            open_.append((start + float(event["dur"]), str(event["name"])))
            number = _number(event)
            if number is not None:
                found[number] = tuple(name for _, name in open_)
    return found


def _number(event: Mapping[str, Any]) -> int | None:
    """Return the number that an operation shares with the kernels that it launched."""
    given = event.get("args", {})
    number: int | None = given.get("External id", given.get("external id"))
    return number


def _by_thread(events: Sequence[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        is_ours = event.get("cat") == "user_annotation" and str(event["name"]).startswith(OURS)
        if is_ours or event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    for operations in threads.values():
        # Those around come before those within, also where they begin together.
        operations.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    return threads


def cpu_work(events: Sequence[Mapping[str, Any]]) -> list[Work]:
    """Return the own time of every operation that a CPU ran, without what is the host's."""
    marks = Marks(events)
    found = []
    for operations in _by_thread(events).values():
        begun: set[tuple[tuple[str, ...], float]] = set()
        for chain, (began, start, end) in _own_times(operations):
            phase = marks.at(start)
            part = part_of_nested(chain, phase)
            if part is not Part.HOST:
                calls = int((chain, began) not in begun)
                begun.add((chain, began))
                found.append(_work(chain[-1], phase, part, (start, end), calls))
    return found


def _own_times(
    operations: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[tuple[str, ...], tuple[float, float, float]]]:
    """Cut nested operations of one thread into stretches of the innermost.

    Yields the names from outside in, with when the innermost began, and the stretch's two ends.
    """
    open_: list[tuple[float, float, str]] = []
    reached = float("-inf")

    def passed(until: float) -> Iterator[tuple[tuple[str, ...], tuple[float, float, float]]]:
        nonlocal reached
        while open_:
            began, end, _ = open_[-1]
            stretch = began, max(reached, began), min(end, until)
            if stretch[2] > stretch[1]:
                yield tuple(name for _, _, name in open_), stretch
                reached = stretch[2]
            if end > until:
                return
            open_.pop()

    for event in operations:
        start = float(event["ts"])
        yield from passed(start)
        open_.append((start, start + float(event["dur"]), str(event["name"])))
    yield from passed(float("inf"))


def _work(
    name: str, phase: str | None, part: Part, ends: tuple[float, float], calls: int = 1
) -> Work:
    start_s, end_s = (moment * _SECONDS for moment in ends)
    span = Span(part=part, start_s=start_s, end_s=end_s, calls=calls)
    return Work(name=name, phase=phase, span=span)
