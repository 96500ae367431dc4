"""What both ways of batching share: the trace's arrivals, the clock, who waits, and the counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from planner.serve_run import TraceRequest
from planner.simulation.server import Server, StepTime, check_trace, too_many_steps
from planner.simulation.tally import Request, Simulation, Tally

_R = TypeVar("_R", bound=Request)


class Replay(ABC, Generic[_R]):
    """A trace, sorted by arrival, that a server serves in steps of `times`.

    Raises PlanError for a request that the cache cannot hold, and beyond `max_steps`.
    """

    def __init__(
        self, trace: Sequence[TraceRequest], server: Server, times: StepTime, max_steps: int
    ) -> None:
        check_trace(server, trace, max_steps)
        self._server, self._times = server, times
        self._waiting: deque[_R] = deque()
        self._tally = Tally()
        self._now_s = 0.0
        self._trace = trace
        self._arrived = 0
        self._max_steps = max_steps

    def run(self) -> Simulation:
        """Serve until nothing waits, runs or is still to come."""
        while True:
            self._arrive()
            if self._serve():
                continue
            if self._arrived == len(self._trace):
                return self._tally.result(self._now_s, self._server.pages)
            self._now_s = max(self._now_s, self._trace[self._arrived].arrival_s)

    @abstractmethod
    def _serve(self) -> bool:
        """Serve what is there; return whether there was anything."""

    @abstractmethod
    def _request(self, number: int, asked: TraceRequest) -> _R:
        """Return a request that has just arrived."""

    def _arrive(self) -> None:
        trace = self._trace
        while self._arrived < len(trace) and trace[self._arrived].arrival_s <= self._now_s:
            self._waiting.append(self._request(self._arrived, trace[self._arrived]))
            self._arrived += 1

    def _pass(self, length_s: float, running: int, pages: int) -> None:
        """Count a step of so many seconds, with so many rows and pages in use, and let them pass."""
        if self._tally.steps >= self._max_steps:
            raise too_many_steps(self._max_steps)
        self._tally.step(self._now_s, length_s, len(self._waiting), running, pages)
        self._now_s += length_s

    def _end(self, request: _R, state: str, ended_s: float) -> None:
        request.state, request.ended_s = state, ended_s
        self._tally.ended(request)
