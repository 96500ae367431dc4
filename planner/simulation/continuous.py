"""Continuous batching, step by step, by the rules of runners/serving/engine.py.

A step admits, runs one chunk of one prompt, then decodes one token of every request whose prompt is
done. Where pages run out, the request that came last gives its own back and runs again later.

Rows that decode take a page each time their length passes a page's end. They all grow by one token a
step, so rows are kept by the place of that end (`_ends`): a step costs the same for any number of rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from planner.serve_run import TraceRequest
from planner.simulation.replay import Replay
from planner.simulation.server import MAX_STEPS, Server, StepTime
from planner.simulation.tally import Request, Simulation


@dataclass(slots=True, eq=False)
class _Running(Request):
    """A request with its place in the server; `began` is the decode step at which it had `tokens`."""

    prefilled: int = 0
    pages: int = 0
    began: int = 0
    decodes: bool = False
    # Which stay in a row this is: an end that was foreseen before a preemption is none.
    stay: int = 0

    @property
    def context(self) -> int:
        """Tokens to run before the next one can be decoded, while it waits or prefills."""
        return self.asked.prompt_tokens + self.tokens


def simulate(
    trace: Sequence[TraceRequest], server: Server, times: StepTime, max_steps: int = MAX_STEPS
) -> Simulation:
    """Serve a trace, sorted by arrival, by continuous batching; return what its requests saw.

    Raises PlanError for a request that the cache cannot hold, and beyond `max_steps`.
    """
    return _Continuous(trace, server, times, max_steps).run()


class _Continuous(Replay[_Running]):
    def __init__(
        self, trace: Sequence[TraceRequest], server: Server, times: StepTime, max_steps: int
    ) -> None:
        super().__init__(trace, server, times, max_steps)
        # In the order of admission: the last one is the first to give way.
        self._running: list[_Running] = []
        self._prefilling: list[_Running] = []
        self._free_pages = server.pages
        self._decoding = 0
        self._decode_steps = 0
        self._cached = 0
        self._ends: list[set[_Running]] = [set() for _ in range(server.page_size)]
        self._done: list[tuple[int, int, int, _Running]] = []
        self._leaving: list[tuple[int, int, int, _Running]] = []

    def _serve(self) -> bool:
        self._cancel()
        if not (self._waiting or self._running):
            return False
        self._step()
        return True

    def _request(self, number: int, asked: TraceRequest) -> _Running:
        request = _Running(number, asked)
        if asked.cancel_after == 0:
            heapq.heappush(self._leaving, (self._decode_steps, number, 0, request))
        return request

    def _cancel(self) -> None:
        """End the requests whose clients have gone away since the last step."""
        while self._leaving and self._leaving[0][0] <= self._decode_steps:
            request = heapq.heappop(self._leaving)[3]
            limit = request.asked.cancel_after
            if request.state in ("done", "cancelled") or self._tokens(request) < (limit or 0):
                continue
            if request in self._running:
                self._leave(request)
            else:
                self._waiting.remove(request)
            self._end(request, "cancelled", self._now_s)

    def _step(self) -> None:
        self._admit()
        chunk, past, is_last = self._prefill()
        self._room_for_decode()
        batch = self._decoding
        context = self._cached + batch
        waits = is_last or batch > 0
        length_s = self._times.step_s(chunk, past, batch, context, waits) if chunk or batch else 0.0
        self._pass(length_s, len(self._running), self._server.pages - self._free_pages)
        if batch:
            self._decode()

    def _admit(self) -> None:
        """Give rows to waiting requests, in order, while all their known tokens have pages."""
        while self._waiting and len(self._running) < self._server.rows:
            request = self._waiting[0]
            if self._server.pages_of(request.context + 1) > self._free_pages:
                return
            self._waiting.popleft()
            request.prefilled, request.pages = 0, 0
            request.stay += 1
            if request.admitted_s is None:
                request.admitted_s = self._now_s
            self._running.append(request)
            self._prefilling.append(request)

    def _prefill(self) -> tuple[int, int, bool]:
        """Run a chunk of the first prompt; return its tokens, those before it, and whether it is the last.

        No tokens where nothing waits to be run.
        """
        if not self._prefilling:
            return 0, 0, False
        request, server = self._prefilling[0], self._server
        past = request.prefilled
        chunk = min(server.chunk_tokens, request.context - past)
        wanted = server.pages_of(past + chunk) - server.passed(past)
        while wanted - request.pages > self._free_pages:
            latest = self._running[-1]
            self._preempt(latest)
            if latest is request:
                return 0, 0, False
        self._take(request, wanted - request.pages)
        request.prefilled += chunk
        is_last = request.prefilled == request.context
        if is_last:
            self._begin(request, self._now_s + self._times.step_s(chunk, past, 0, 0))
        return chunk, past, is_last

    def _take(self, request: _Running, pages: int) -> None:
        request.pages += pages
        self._free_pages -= pages

    def _begin(self, request: _Running, first_s: float) -> None:
        """Note the token that a finished prompt gives, and decode from the next forward on."""
        self._prefilling.remove(request)
        cached = request.context
        request.tokens += 1
        if request.first_token_s is None:
            request.first_token_s = first_s
        if request.tokens == request.asked.new_tokens:
            self._leave(request)
            self._end(request, "done", first_s)
            return
        request.decodes, request.began = True, self._decode_steps
        self._decoding += 1
        self._cached += cached
        self._ends[(cached - self._decode_steps) % self._server.page_size].add(request)
        if self._server.window is not None:
            self._slide(request)
        place = self._decode_steps + request.asked.new_tokens - request.tokens
        heapq.heappush(self._done, (place, request.number, request.stay, request))
        limit = request.asked.cancel_after
        if limit is not None and limit < request.asked.new_tokens:
            gone = max(self._decode_steps, self._decode_steps + limit - request.tokens)
            heapq.heappush(self._leaving, (gone, request.number, request.stay, request))

    def _room_for_decode(self) -> None:
        """Take the pages of one more token of every row that decodes; the latest give way."""
        step, size = self._decode_steps, self._server.page_size
        if self._server.window is not None:
            for request in self._ends[(self._server.window - 1 - step) % size]:
                self._slide(request)
        takers = self._ends[-step % size]
        while len(takers) > self._free_pages:
            self._preempt(self._running[-1])
        for request in takers:
            request.pages += 1
        self._free_pages -= len(takers)

    def _slide(self, request: _Running) -> None:
        """Give back the page that a window has passed with the last token."""
        cached = self._cached_of(request)
        kept = self._server.pages_of(cached) - self._server.passed(cached)
        self._take(request, min(0, kept - request.pages))

    def _decode(self) -> None:
        """Note one token of every row that decodes, and the ends that this brings."""
        self._cached += self._decoding
        self._decode_steps += 1
        while self._done and self._done[0][0] <= self._decode_steps:
            _, _, stay, request = heapq.heappop(self._done)
            if request.decodes and request.stay == stay:
                self._leave(request)
                self._end(request, "done", self._now_s)

    def _tokens(self, request: _Running) -> int:
        since = self._decode_steps - request.began if request.decodes else 0
        return request.tokens + since

    def _cached_of(self, request: _Running) -> int:
        """Return the tokens in the cache of a row that decodes: all but the newest."""
        return request.asked.prompt_tokens + self._tokens(request) - 1

    def _preempt(self, request: _Running) -> None:
        """Take a request's pages; it waits, before all others, to run again from its tokens."""
        self._leave(request)
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _leave(self, request: _Running) -> None:
        self._running.remove(request)
        if request.decodes:
            cached = self._cached_of(request)
            self._ends[(cached - self._decode_steps) % self._server.page_size].discard(request)
            self._cached -= cached
            self._decoding -= 1
            request.tokens = self._tokens(request)
            request.decodes = False
        elif request in self._prefilling:
            self._prefilling.remove(request)
        self._take(request, -request.pages)
