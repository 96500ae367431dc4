"""However often requests give way to each other, each gets the tokens that it gets alone, in fp32."""

from __future__ import annotations

import random

import pytest
import torch

from planner.decode_run import AttentionBackend, CacheKind
from runners.serving.caches import PagedCache
from runners.serving.decoder import Decoder
from runners.serving.engine import Engine, Request, RequestState
from tests.runners.serving.tiny import make_cache, ours, random_prompts

ROWS, CAPACITY = 8, 64
# A little more than the longest request needs: hardly two run undisturbed.
PAGES = 17
REQUESTS = 18


def engine_of(name: str, rows: int, pages: int, chunk: int) -> tuple[Engine, PagedCache]:
    model = ours(name)
    cache = make_cache(model, CacheKind.PAGED, rows, CAPACITY, num_pages=pages)
    assert isinstance(cache, PagedCache)
    decoder = Decoder(model, cache, AttentionBackend.TORCH)
    return Engine(decoder, cache, chunk_tokens=chunk), cache


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("qwen3 hybrid", 1)])
def test_tokens_are_those_of_each_request_alone(name: str, seed: int) -> None:
    draw = random.Random(seed)
    asked = [
        (random_prompts(1, draw.randint(1, 24), seed=100 * seed + number)[0], draw.randint(8, 40))
        for number in range(REQUESTS)
    ]
    engine, cache = engine_of(name, ROWS, PAGES, chunk=draw.choice([5, 16]))
    requests = [Request(prompt, new) for prompt, new in asked]
    waiting = list(requests)
    while waiting or not engine.is_idle:
        for _ in range(min(len(waiting), draw.choice([0, 0, 1, 3]))):
            engine.submit(waiting.pop(0))
        engine.step()
        assert engine.steps < 20_000
    assert {request.state for request in requests} == {RequestState.DONE}
    assert sum(request.preemptions for request in requests) > 50
    assert cache.num_free() == PAGES

    lonely, _ = engine_of(name, 1, PAGES, chunk=64)
    for request, (prompt, new) in zip(requests, asked, strict=True):
        again = Request(prompt, new)
        lonely.submit(again)
        while not lonely.is_idle:
            lonely.step()
        assert torch.equal(torch.tensor(again.tokens), torch.tensor(request.tokens))
