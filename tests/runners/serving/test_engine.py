"""Requests served together get the tokens that each gets alone, and give all pages back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.decode_run import AttentionBackend, CacheKind
from runners.serving.caches import PagedCache
from runners.serving.decoder import Decoder
from runners.serving.engine import Engine, Request, RequestState
from tests.runners.serving.tiny import generated, make_cache, ours, random_prompts, tiny_model

LENGTHS = (5, 17, 1, 9, 12, 3)
NEW = (7, 4, 10, 1, 6, 9)
PAGES = 48


class Ticks:
    """A clock that counts its readings."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def make_engine(
    name: str = "llama", rows: int = 3, pages: int = PAGES, chunk: int = 6
) -> tuple[Engine, PagedCache]:
    model = ours(name)
    cache = make_cache(model, CacheKind.PAGED, rows, 24, num_pages=pages)
    assert isinstance(cache, PagedCache)
    decoder = Decoder(model, cache, AttentionBackend.TORCH)
    return Engine(decoder, cache, chunk_tokens=chunk, now=Ticks()), cache


def make_requests() -> list[Request]:
    prompts = [random_prompts(1, n, seed=n)[0] for n in LENGTHS]
    return [Request(prompt, new) for prompt, new in zip(prompts, NEW, strict=True)]


def alone(name: str) -> list[list[int]]:
    """What transformers decodes for each request by itself."""
    model = tiny_model(name, "eager")
    requests = make_requests()
    return [generated(model, one.prompt[None], one.new_tokens)[0].tolist() for one in requests]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return alone("llama")


def serve(engine: Engine, most_steps: int = 500) -> None:
    while not engine.is_idle:
        engine.step()
        assert engine.steps < most_steps


def test_requests_served_together_decode_as_each_alone(expected: list[list[int]]) -> None:
    """They arrive one by one, every second step."""
    engine, cache = make_engine()
    requests = make_requests()
    for request in requests:
        engine.submit(request)
        engine.step()
        engine.step()
    serve(engine)
    assert [request.tokens for request in requests] == expected
    assert {request.state for request in requests} == {RequestState.DONE}
    assert cache.num_free() == PAGES
    for request in requests:
        assert request.first_token_s is not None and request.ended_s is not None
        assert request.submitted_s < request.first_token_s <= request.ended_s


def test_where_pages_run_out_the_latest_waits_and_loses_no_token(
    expected: list[list[int]],
) -> None:
    """6 pages of 4 tokens hold the longest request alone, and not three at once."""
    engine, cache = make_engine(pages=6)
    requests = make_requests()
    for request in requests:
        engine.submit(request)
    serve(engine)
    assert [request.tokens for request in requests] == expected
    assert sum(request.preemptions for request in requests) > 0
    assert requests[0].preemptions == 0  # the first that came gives way to nobody
    assert cache.num_free() == 6


def test_windows_are_served_from_few_pages() -> None:
    engine, cache = make_engine("mistral", pages=8)
    requests = make_requests()
    for request in requests:
        engine.submit(request)
    serve(engine)
    assert [request.tokens for request in requests] == alone("mistral")
    assert cache.num_free() == 8


@pytest.mark.parametrize("seed", range(4))
def test_cancelled_and_failing_requests_leave_nothing_and_disturb_nobody(
    seed: int, expected: list[list[int]]
) -> None:
    """At random moments clients go away; one prompt holds a token that the model does not have."""
    draw = random.Random(seed)
    engine, cache = make_engine(pages=9)
    requests = make_requests()
    bad = Request(torch.tensor([3, 10_000, 5]), 4)
    for request in (*requests[:3], bad, *requests[3:]):
        engine.submit(request)
    while not engine.is_idle:
        engine.step()
        if draw.random() < 0.15:
            engine.cancel(draw.choice(requests))
        assert engine.steps < 500
    assert (bad.state, bad.tokens) == (RequestState.FAILED, [])
    assert "index out of range" in str(bad.reason)
    assert cache.num_free() == 9
    for request, tokens in zip(requests, expected, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
        done = request.state is RequestState.DONE
        assert done == (request.tokens == tokens) or request.state is RequestState.CANCELLED


def test_what_can_never_run_fails_at_once_with_its_reason() -> None:
    engine, cache = make_engine()
    cases: list[tuple[Tensor, int, str]] = [
        (torch.zeros(20, dtype=torch.long), 5, "25 tokens do not fit the 24 of a sequence"),
        (torch.zeros(0, dtype=torch.long), 5, "a request needs a prompt and a new token"),
        (torch.zeros(3, dtype=torch.long), 0, "a request needs a prompt and a new token"),
    ]
    for prompt, new, reason in cases:
        request = Request(prompt, new)
        engine.submit(request)
        engine.cancel(request)  # of one that has ended changes nothing
        found: tuple[Any, ...] = (request.state, request.reason)
        assert found == (RequestState.FAILED, reason)
    assert engine.is_idle
    assert cache.num_free() == PAGES
    with pytest.raises(ValueError, match="chunk_tokens is 0; it must be at least 1"):
        make_engine(chunk=0)


def test_the_host_s_time_is_parted_into_starting_waiting_and_the_rest() -> None:
    engine, _ = make_engine()
    for request in make_requests():
        engine.submit(request)
    serve(engine)
    host = engine.host
    # On a CPU forwards run while they are started, and nothing is left to wait for.
    assert 0 < host.wait_s < host.launch_s
    assert host.launch_s + host.wait_s < host.steps_s
