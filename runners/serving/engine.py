"""Continuous batching over a paged cache: requests join and leave between two steps.

A step runs one chunk of one prompt, then decodes one token of every request whose prompt is done. Where
pages run out, the request that came last gives its own back and is run again later, its tokens kept.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from runners.measure import Clock
from runners.serving.caches import PagedCache
from runners.serving.decoder import Decoder


class RequestState(StrEnum):
    """Where a request is; the last three are its ends."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = (RequestState.DONE, RequestState.CANCELLED, RequestState.FAILED)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt (S,) of token ids on the device, and what has become of it; times are the engine's."""

    prompt: Tensor
    new_tokens: int
    state: RequestState = RequestState.WAITING
    tokens: list[int] = field(default_factory=list)
    row: int = -1
    prefilled: int = 0
    preemptions: int = 0
    reason: str | None = None
    submitted_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None

    @property
    def context(self) -> int:
        """Tokens to run before the next one can be decoded."""
        return len(self.prompt) + len(self.tokens)

    def next_chunk(self, size: int) -> Tensor:
        """Return the next tokens (1, at most `size`) of its prompt and what it decoded before."""
        known = self.prompt
        if self.tokens:
            decoded = torch.tensor(self.tokens, dtype=known.dtype, device=known.device)
            known = torch.cat([known, decoded])
        return known[None, self.prefilled : self.prefilled + size]


@dataclass(slots=True)
class HostTime:
    """Seconds of the host in steps: all, in starting forwards, and in waiting for their tokens.

    The rest of a step is scheduling.
    """

    steps_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0


class Engine:
    """Serves requests with a decoder over a paged cache; `now` is the clock of their times."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        chunk_tokens: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
        self._decoder = decoder
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._now = now
        self._clock = Clock(cache.lengths.device)
        self._waiting: deque[Request] = deque()
        # In the order in which they were admitted: the last one is the first to give way.
        self._running: list[Request] = []
        self._free_rows = list(range(cache.rows))
        self._marks: list[tuple[object, object]] = []
        self.steps = 0
        self.host = HostTime()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._running

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never run fails at once, with its reason."""
        request.submitted_s = self._now()
        total = len(request.prompt) + request.new_tokens
        if len(request.prompt) == 0 or request.new_tokens < 1:
            self._end(request, RequestState.FAILED, "a request needs a prompt and a new token")
        elif total > self._cache.capacity:
            reason = f"{total} tokens do not fit the {self._cache.capacity} of a sequence"
            self._end(request, RequestState.FAILED, reason)
        else:
            self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request and give back what it holds; one that has ended stays as it is."""
        if request.state not in ENDED:
            self._end(request, RequestState.CANCELLED, "cancelled")

    def step(self) -> None:
        """Admit, run one chunk of one prompt, decode one token of every request that can."""
        self.steps += 1
        begun_s = time.perf_counter()
        self._admit()
        prefilling = [one for one in self._running if one.state is RequestState.PREFILLING]
        if prefilling:
            self._prefill(prefilling[0])
        self._decode()
        self.host.steps_s += time.perf_counter() - begun_s

    def device_s(self) -> float:
        """Return the device's time in forwards so far; waits for it."""
        return sum(self._clock.seconds(start, end) for start, end in self._marks)

    def _admit(self) -> None:
        """Give rows to waiting requests, in order, while all their known tokens have pages."""
        while self._waiting and self._free_rows:
            request = self._waiting[0]
            if not self._cache.fits([(self._free_rows[0], request.context + 1)]):
                return
            self._waiting.popleft()
            request.row = heapq.heappop(self._free_rows)
            request.state, request.prefilled = RequestState.PREFILLING, 0
            self._running.append(request)

    def _prefill(self, request: Request) -> None:
        chunk = request.next_chunk(self._chunk_tokens)
        self._make_room([request], chunk.shape[1])
        if request.row < 0:
            return
        start, begun_s = self._clock.now(), time.perf_counter()
        try:
            rows = slice(request.row, request.row + 1)
            following = self._decoder.prefill(chunk, rows, past=request.prefilled)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            self._end(request, RequestState.FAILED, str(error))
            return
        self._marks.append((start, self._clock.now()))
        self.host.launch_s += time.perf_counter() - begun_s
        request.prefilled += chunk.shape[1]
        if request.prefilled == request.context:
            request.state = RequestState.DECODING
            self._took(request, self._read(following)[0])

    def _decode(self) -> None:
        decoding = [one for one in self._running if one.state is RequestState.DECODING]
        self._make_room(decoding, 1)
        decoding = [one for one in decoding if one.row >= 0]
        if not decoding:
            return
        start, begun_s = self._clock.now(), time.perf_counter()
        tokens = self._decoder.decode([one.row for one in decoding])
        self._marks.append((start, self._clock.now()))
        self.host.launch_s += time.perf_counter() - begun_s
        found = self._read(tokens)
        for request, row in [(one, one.row) for one in decoding]:
            self._took(request, found[row])

    def _read(self, tokens: Tensor) -> list[int]:
        """Return tokens (B,) on the host, which waits for the device."""
        begun_s = time.perf_counter()
        found: list[int] = tokens.tolist()
        self.host.wait_s += time.perf_counter() - begun_s
        return found

    def _make_room(self, requests: list[Request], tokens: int) -> None:
        """Let the latest request give way until those of `requests` left can all grow by `tokens`."""
        while growth := [(one.row, tokens) for one in requests if one.row >= 0]:
            if self._cache.fits(growth):
                return
            latest = self._running[-1]
            if len(self._running) > 1:
                self._preempt(latest)
            else:
                reason = "the cache has too few pages for this request alone; give it more"
                self._end(latest, RequestState.FAILED, reason)

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it waits, before all others, to run again from its tokens."""
        self._leave(request)
        request.state = RequestState.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _took(self, request: Request, token: int) -> None:
        """Note a request's new token, and its end if that was the last."""
        request.tokens.append(token)
        if request.first_token_s is None:
            request.first_token_s = self._now()
        if len(request.tokens) == request.new_tokens:
            self._end(request, RequestState.DONE, None)

    def _end(self, request: Request, state: RequestState, reason: str | None) -> None:
        if request in self._running:
            self._leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        request.state, request.reason, request.ended_s = state, reason, self._now()

    def _leave(self, request: Request) -> None:
        self._running.remove(request)
        self._cache.finish(request.row)
        heapq.heappush(self._free_rows, request.row)
        request.row = -1
