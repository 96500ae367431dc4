"""What another server made of the same trace: its tokens, and when each came."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.serve_run import PERCENTILES, TraceRequest, percentile

_IDLE_S = 0.001


@dataclass(slots=True)
class PeerRequest:
    """A request as a peer gets it; `times_s` of its tokens count from the trace's start.

    A client that goes away after some tokens asks for no more than those.
    """

    asked: TraceRequest
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def wanted(self) -> int:
        """Tokens to ask for."""
        limit = self.asked.cancel_after
        return self.asked.new_tokens if limit is None else min(limit, self.asked.new_tokens)

    @property
    def state(self) -> str:
        """done, cancelled or failed, as our own requests end."""
        if self.error is not None or len(self.tokens) < self.wanted:
            return "failed"
        return "done" if self.wanted == self.asked.new_tokens else "cancelled"


class Arrivals:
    """Hands out requests when their time comes, by the clock since `start_s`."""

    def __init__(self, requests: Sequence[PeerRequest]) -> None:
        self._coming = [one for one in requests if one.wanted > 0]
        self._next = 0
        self.start_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether all have arrived."""
        return self._next == len(self._coming)

    def due(self) -> Iterator[PeerRequest]:
        """Yield those that have arrived since the last call."""
        now_s = time.perf_counter() - self.start_s
        while not self.is_over and self._coming[self._next].asked.arrival_s <= now_s:
            self._next += 1
            yield self._coming[self._next - 1]

    def rest(self) -> None:
        """Wait a moment, where nothing else is to be done."""
        time.sleep(_IDLE_S)


def peer_figures(
    requests: Sequence[PeerRequest], duration_s: float, ours: Sequence[Sequence[int]] | None
) -> dict[str, Any]:
    """Return a peer's figures, named as ours; `tokens_equal` where it had the same weights."""
    done = [one for one in requests if one.state == "done"]
    times = {
        "ttft_s": [one.times_s[0] - one.asked.arrival_s for one in done],
        "tpot_s": [
            (one.times_s[-1] - one.times_s[0]) / (len(one.tokens) - 1)
            for one in done
            if len(one.tokens) > 1
        ],
        "e2e_s": [one.times_s[-1] - one.asked.arrival_s for one in done],
    }
    tokens = sum(len(one.tokens) for one in requests)
    errors = [one.error for one in requests if one.error is not None]
    return {
        "duration_s": duration_s,
        "tokens_per_s": tokens / duration_s,
        "states": dict(Counter(one.state for one in requests)),
        "latency": {
            name: {f"p{p}": percentile(values, p) for p in PERCENTILES}
            for name, values in times.items()
            if values
        },
        "tokens_equal": None if ours is None else _equal(requests, ours),
        "first_error": errors[0][:500] if errors else None,
    }


def _equal(requests: Sequence[PeerRequest], ours: Sequence[Sequence[int]]) -> float | None:
    """Return the share of tokens that equal ours, of those that both have."""
    pairs = [
        own == other
        for request, tokens in zip(requests, ours, strict=True)
        for own, other in zip(tokens, request.tokens, strict=False)
    ]
    return sum(pairs) / len(pairs) if pairs else None
