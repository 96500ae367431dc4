"""Models of transformers decode over our caches, token for token as transformers does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planner.decode_run import AttentionBackend, CacheDtype, CacheKind
from runners.serving.caches import PagedCache, stored_dtype
from runners.serving.decoder import Decoder
from runners.serving.pages import CacheFullError
from tests.runners.serving.tiny import (
    FAMILIES,
    decoded,
    generated,
    make_cache,
    ours,
    random_prompts,
    tiny_model,
)


@pytest.mark.parametrize("kind", list(CacheKind))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_what_transformers_decodes(name: str, kind: CacheKind) -> None:
    prompts = random_prompts(2, 13)
    expected = generated(tiny_model(name, "eager"), prompts, 20)
    assert len(set(expected.flatten().tolist())) > 10  # not one token again and again
    model = ours(name)
    cache = make_cache(model, kind, 2, 33)
    assert torch.equal(
        decoded(Decoder(model, cache, AttentionBackend.TORCH), prompts, 20), expected
    )


@pytest.mark.parametrize("kind", list(CacheKind))
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3 hybrid"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(name: str, kind: CacheKind) -> None:
    """Chunks of 6 go through the gathered cache or, one token at a time, through the decode kernel."""
    prompts = random_prompts(2, 13)
    expected = generated(tiny_model(name, "eager"), prompts, 8)
    for chunk in (6, 1):
        model = ours(name)
        decoder = Decoder(model, make_cache(model, kind, 2, 24), AttentionBackend.TORCH)
        assert torch.equal(decoded(decoder, prompts, 8, chunk), expected)


@pytest.mark.parametrize("kind", list(CacheKind))
@pytest.mark.parametrize("dtype", [CacheDtype.FP8, CacheDtype.INT8])
def test_one_byte_caches_give_nearly_the_same_logits(kind: CacheKind, dtype: CacheDtype) -> None:
    """The hidden state of a decoded token, in bf16, against that over a cache in bf16."""
    found = []
    for chosen in (CacheDtype.MODEL, dtype):
        model = ours("llama", torch.bfloat16)
        kept: list[Tensor] = []
        model.lm_head.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))  # type: ignore[union-attr, operator]
        stored = stored_dtype(chosen, torch.bfloat16)
        decoder = Decoder(model, make_cache(model, kind, 2, 16, stored), AttentionBackend.TORCH)
        decoded(decoder, random_prompts(2, 12), 2)
        found.append(kept[-1].float())
    change = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < change < {CacheDtype.FP8: 0.15, CacheDtype.INT8: 0.05}[dtype]


def test_rows_grow_until_their_capacity_and_say_so() -> None:
    model = ours("llama")
    decoder = Decoder(model, make_cache(model, CacheKind.CONTIGUOUS, 1, 12), AttentionBackend.TORCH)
    with pytest.raises(CacheFullError, match="13 tokens does not fit a cache of 12 tokens per"):
        decoder.prefill(random_prompts(1, 13), slice(0, 1))
    decoder.prefill(random_prompts(1, 12), slice(0, 1))
    with pytest.raises(CacheFullError, match="13 tokens does not fit"):
        decoder.decode()
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        decoder.prefill(random_prompts(1, 0), slice(0, 1))


def test_a_window_gives_pages_back_and_decodes_on_within_few(name: str = "mistral") -> None:
    """40 tokens through 4 pages of 4: a window of 9 never needs more."""
    model = ours(name)
    prompts = random_prompts(1, 3)
    expected = generated(tiny_model(name, "eager"), prompts, 37)
    cache = make_cache(model, CacheKind.PAGED, 1, 40, num_pages=4)
    assert torch.equal(
        decoded(Decoder(model, cache, AttentionBackend.TORCH), prompts, 37), expected
    )
    assert isinstance(cache, PagedCache)
    cache.finish(0)
    assert cache.num_free() == 4


def test_a_forked_row_shares_pages_until_it_writes() -> None:
    """Two rows go on from one prompt: 3 pages shared, the last one copied."""
    prompt = random_prompts(1, 10)
    expected = generated(tiny_model("llama", "eager"), prompt, 6)
    model = ours("llama")
    cache = make_cache(model, CacheKind.PAGED, 2, 16)
    assert isinstance(cache, PagedCache)
    decoder = Decoder(model, cache, AttentionBackend.TORCH)
    first = decoder.prefill(prompt, slice(0, 1))
    cache.fork(0, 1, 9)
    assert cache.num_free() == 8 - 3
    assert torch.equal(decoder.prefill(prompt[:, 9:], slice(1, 2), past=9), first)
    assert cache.num_free() == 8 - 4
    rest = torch.stack([decoder.decode().clone() for _ in range(5)], dim=1)
    assert torch.equal(rest, expected[:, 1:].expand(2, 5))
    cache.finish(0)
    cache.finish(1)
    assert cache.num_free() == 8


def test_what_cannot_be_done_is_said_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="attention is 'eager'; it must be 'peakmark_serving'"):
        Decoder(tiny_model("llama", "eager"), make_cache(ours("llama"), CacheKind.PAGED, 1, 8),
                AttentionBackend.TORCH)  # fmt: skip
    with pytest.raises(ValueError, match="cache_dtype is 'fp8': it must be model where the weigh"):
        stored_dtype(CacheDtype.FP8, torch.float32)
    with pytest.raises(ValueError, match="pages is 2: it must be at least 4, for one sequence"):
        make_cache(ours("llama"), CacheKind.PAGED, 1, 16, num_pages=2)
