"""What a simulation counts: every request's times, percentiles, and how queue and cache filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.serve_run import PERCENTILES, TraceRequest, percentile

# Kept of the course of a long simulation: memory stays bounded, and a figure shows no more.
MAX_SAMPLES = 1024
MAX_KEPT_REQUESTS = 5000


@dataclass(slots=True, eq=False)
class Request:
    """A request of a trace and what became of it; times are from the trace's start."""

    number: int
    asked: TraceRequest
    tokens: int = 0
    preemptions: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float = 0.0
    state: str = "waiting"

    def row(self) -> tuple[Any, ...]:
        """Return REQUEST_COLUMNS."""
        arrival_s = self.asked.arrival_s
        admitted_s = None if self.admitted_s is None else self.admitted_s - arrival_s
        return (
            *(arrival_s, self.asked.prompt_tokens, self.tokens, admitted_s),
            *(self.ttft_s, self.tpot_s, self.ended_s - arrival_s, self.preemptions, self.state),
        )

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token; None where there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.asked.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens; None for fewer than two."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.tokens - 1)


REQUEST_COLUMNS = (
    *("arrival_s", "prompt_tokens", "new_tokens", "waited_s"),
    *("ttft_s", "tpot_s", "e2e_s", "preemptions", "state"),
)
SAMPLE_COLUMNS = ("time_s", "waiting", "running", "pages")


@dataclass(slots=True)
class Tally:
    """Counts while a simulation goes on."""

    states: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_s: float = 0.0
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    _times: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ("ttft_s", "tpot_s", "e2e_s")}
    )
    _every: int = 1
    _waited_s: float = 0.0
    _page_s: float = 0.0
    _most: tuple[int, int, int] = (0, 0, 0)

    def ended(self, request: Request) -> None:
        """Count a request that has ended; only one that is done has latencies that compare."""
        self.states[request.state] += 1
        self.tokens += request.tokens
        self.preemptions += request.preemptions
        if len(self.requests) < MAX_KEPT_REQUESTS:
            self.requests.append(request.row())
        if request.state != "done":
            return
        e2e_s = request.ended_s - request.asked.arrival_s
        for name, value in (
            ("ttft_s", request.ttft_s), ("tpot_s", request.tpot_s), ("e2e_s", e2e_s),
        ):  # fmt: skip
            if value is not None:
                self._times[name].append(value)

    def step(self, start_s: float, length_s: float, waiting: int, running: int, pages: int) -> None:
        """Count a step and what waited, ran and was held in it."""
        self.busy_s += length_s
        self._waited_s += waiting * length_s
        self._page_s += pages * length_s
        most = self._most
        if waiting > most[0] or running > most[1] or pages > most[2]:
            self._most = (max(most[0], waiting), max(most[1], running), max(most[2], pages))
        if self.steps % self._every == 0:
            self.samples.append((start_s, waiting, running, pages))
            if len(self.samples) == MAX_SAMPLES:
                self.samples = self.samples[::2]
                self._every *= 2
        self.steps += 1

    def result(self, duration_s: float, pages: int) -> Simulation:
        """Return what was counted over `duration_s` on a server of `pages`."""
        return Simulation(
            duration_s=duration_s,
            states=dict(self.states),
            latency={
                name: {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
                for name, values in self._times.items()
                if values
            },
            tokens=self.tokens,
            tokens_per_s=self.tokens / duration_s if duration_s else 0.0,
            preemptions=self.preemptions,
            steps=self.steps,
            busy_share=self.busy_s / duration_s if duration_s else 0.0,
            mean_queue=self._waited_s / duration_s if duration_s else 0.0,
            most_waiting=self._most[0],
            most_running=self._most[1],
            mean_cache_share=self._page_s / duration_s / pages if duration_s else 0.0,
            most_cache_share=self._most[2] / pages,
            requests=tuple(self.requests),
            samples=tuple(self.samples),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How a trace was served: percentiles of requests that are done, speed, queue, cache.

    `requests` are REQUEST_COLUMNS of the first that ended, `samples` SAMPLE_COLUMNS over time. Means of
    queue and cache are over time.
    """

    duration_s: float
    states: dict[str, int]
    latency: dict[str, dict[str, float]]
    tokens: int
    tokens_per_s: float
    preemptions: int
    steps: int
    busy_share: float
    mean_queue: float
    most_waiting: int
    most_running: int
    mean_cache_share: float
    most_cache_share: float
    requests: Sequence[tuple[Any, ...]]
    samples: Sequence[tuple[float, int, int, int]]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; columns are named beside requests and samples."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return plain | {
            "request_columns": list(REQUEST_COLUMNS),
            "requests": [list(row) for row in self.requests],
            "sample_columns": list(SAMPLE_COLUMNS),
            "samples": [list(row) for row in self.samples],
        }
