"""The planner's simulation serves a trace as the engine does: step by step, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from planner.serve_run import TraceRequest
from planner.simulation.continuous import simulate
from planner.simulation.server import Server
from runners.serving.caches import PagedCache
from runners.serving.decoder import Decoder
from runners.serving.engine import Engine, Request
from runners.serving.shapes import CacheShape
from tests.planner.test_simulation import random_trace


class Work:
    """Seconds of a step, of which every part is another whole number."""

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context: int,
        waits: bool = True,
    ) -> float:
        prefill_s = 100 + 3 * prefill_tokens + prefill_context if prefill_tokens else 0
        return float(prefill_s + (1000 + 7 * decode_batch + decode_context if decode_batch else 0))


class Timed:
    """A decoder without a model: it keeps the cache's counts, and a clock that its work advances."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.now_s, self.work = cache, 0.0, Work()

    def prefill(self, tokens: Tensor, rows: slice, *, past: int) -> Tensor:
        self.cache.grow(rows.start, tokens.shape[1])
        self.now_s += self.work.step_s(tokens.shape[1], past, 0, 0)
        return torch.zeros(1, dtype=torch.long)

    def decode(self, rows: Sequence[int]) -> Tensor:
        for row in rows:
            self.cache.grow(row, 1)
        context = sum(self.cache.tokens(row) for row in rows)
        self.now_s += self.work.step_s(0, 0, len(rows), context)
        return torch.zeros(self.cache.rows, dtype=torch.long)


def served(asked: Sequence[TraceRequest], server: Server) -> tuple[list[Request], Engine]:
    """Replay a trace over the real engine and the real pages, by the decoder's clock."""
    shape = CacheShape(kv_heads=1, head_dim=1, windows=(server.window,))
    cache = PagedCache(
        shape, server.rows, 70, torch.float32, torch.device("cpu"),
        page_size=server.page_size, num_pages=server.pages,
    )  # fmt: skip
    timed = Timed(cache)
    engine = Engine(
        cast("Decoder", timed), cache, chunk_tokens=server.chunk_tokens, now=lambda: timed.now_s
    )
    requests = [Request(torch.zeros(one.prompt_tokens), one.new_tokens) for one in asked]
    arrived = 0
    while arrived < len(asked) or not engine.is_idle:
        while arrived < len(asked) and asked[arrived].arrival_s <= timed.now_s:
            engine.submit(requests[arrived])
            arrived += 1
        for one, request in zip(asked[:arrived], requests, strict=False):
            if one.cancel_after is not None and len(request.tokens) >= one.cancel_after:
                engine.cancel(request)
        if not engine.is_idle:
            engine.step()
        elif arrived < len(asked):
            timed.now_s = max(timed.now_s, asked[arrived].arrival_s)
    return requests, engine


@pytest.mark.parametrize("seed", range(40))
def test_the_simulation_is_the_engine_s_own_schedule(seed: int) -> None:
    asked, server = random_trace(seed)
    # Hours apart in this clock, so that some arrive while others run and some into an idle server.
    asked = [
        TraceRequest(
            arrival_s=round(one.arrival_s * 8000),
            prompt_tokens=one.prompt_tokens,
            new_tokens=one.new_tokens,
            cancel_after=one.cancel_after,
        )
        for one in asked
    ]
    requests, engine = served(asked, server)
    found = simulate(asked, server, Work())
    assert found.steps == engine.steps
    expected = sorted(
        (
            one.arrival_s,
            one.prompt_tokens,
            len(request.tokens),
            None if request.first_token_s is None else request.first_token_s - one.arrival_s,
            (request.ended_s or 0.0) - one.arrival_s,
            request.preemptions,
            str(request.state),
        )
        for one, request in zip(asked, requests, strict=True)
    )
    assert sorted((*row[:3], row[4], *row[6:]) for row in found.requests) == expected
