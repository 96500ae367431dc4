"""Padded prefills over staged block tables give the tokens of plain ones, and touch no page but their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from planner.decode_run import AttentionBackend, CacheKind
from planner.serve_run import MAX_GRAPH_TOKENS, padded_tokens
from runners.serving.caches import PagedCache
from runners.serving.decoder import Decoder
from runners.serving.prefill_graphs import PrefillGraphs
from tests.runners.serving.tiny import generated, make_cache, ours, random_prompts, tiny_model


@pytest.fixture(autouse=True)
def run_instead_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a replay runs the model again over what the graph's tensors hold."""

    def recorded(_self: PrefillGraphs, run: Callable[[], None]) -> Callable[[], object]:
        run()
        return run

    monkeypatch.setattr(PrefillGraphs, "_recorded", recorded)


def decoder_of(name: str, cache: PagedCache) -> Decoder:
    decoder = Decoder(ours(name), cache, AttentionBackend.TORCH)
    decoder.prefill_graphs = PrefillGraphs(decoder._forward, cache, AttentionBackend.TORCH)
    return decoder


def paged(name: str, rows: int, capacity: int) -> PagedCache:
    cache = make_cache(ours(name), CacheKind.PAGED, rows, capacity)
    assert isinstance(cache, PagedCache)
    return cache


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3 hybrid", "qwen3_moe", "deepseek_v3"])
def test_padded_chunks_of_any_row_give_the_plain_tokens(name: str) -> None:
    """13 tokens as chunks of 6, 6 and 1 through graphs of 8 tokens after 0, 6 and 12, in row 1 of 2."""

    prompts = random_prompts(2, 13)
    expected = generated(tiny_model(name, "eager"), prompts, 8)
    cache = paged(name, 2, 24)
    decoder = decoder_of(name, cache)
    for past in (0, 6, 12):
        assert decoder.capture_prefill(1, 8, past)
    # The other row first, so that pages and tables are not those of the capture.
    first = [_prefilled(decoder, prompts[row : row + 1], row) for row in (1, 0)]
    tokens = [torch.tensor([first[1], first[0]])]
    tokens += [decoder.decode().clone() for _ in range(7)]
    assert torch.equal(torch.stack(tokens, dim=1), expected)


def _prefilled(decoder: Decoder, prompt: torch.Tensor, row: int) -> int:
    following = torch.zeros(1)
    for past in (0, 6, 12):
        chunk = prompt[:, past : min(past + 6, 13)]
        following = decoder.prefill(chunk, slice(row, row + 1), past=past)
    return int(following[0])


def test_padding_goes_behind_a_row_s_end_or_into_the_spare_page() -> None:
    """Three tokens in a graph of eight, pages of four: one page of its own, one spare."""
    cache = paged("llama", 2, 16)
    decoder = decoder_of("llama", cache)
    decoder.capture_prefill(1, 8)
    for index in range(2):
        view = cache.layer(index, slice(0, 2))
        view.k.fill_(0.0)
    decoder.prefill(random_prompts(1, 3), slice(0, 1))
    for index in range(2):
        view = cache.layer(index, slice(0, 2))
        assert view.block_table is not None
        touched = view.k.abs().sum((1, 2, 3)).nonzero().flatten().tolist()
        assert touched == sorted({int(view.block_table[0, 0]), cache.spare_page})
    assert cache.lengths.tolist() == [3, 0]
    assert cache.num_free() == cache.spare_page - 1


def test_what_is_too_large_or_not_captured_runs_plainly() -> None:
    cache = paged("llama", 1, 24)
    decoder = decoder_of("llama", cache)
    assert not decoder.capture_prefill(MAX_GRAPH_TOKENS, 2)
    assert decoder.capture_prefill(1, 4)
    prompts = random_prompts(1, 13)
    expected = generated(tiny_model("llama", "eager"), prompts, 1)
    # Thirteen tokens fit no graph of four.
    assert torch.equal(decoder.prefill(prompts, slice(0, 1)), expected[:, 0])
    assert not Decoder(ours("llama"), cache, AttentionBackend.TORCH).capture_prefill(1, 4)


@pytest.mark.parametrize(("chunk", "expected"), [(512, 64), (1024, 128), (100, 64), (2048, 256)])
def test_a_part_of_a_chunk_is_padded_to_an_eighth(chunk: int, expected: int) -> None:
    assert padded_tokens(chunk) == expected
