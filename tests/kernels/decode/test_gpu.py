"""Decode attention on a real GPU: bf16, long caches, its bytes, repeats under poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode.reference import reference_decode
from kernels.decode.triton import decode_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
Check = Callable[[str, Tensor, Tensor, Tensor], None]


def make_inputs(
    batch: int, heads: tuple[int, int], seq_q: int, seq: int, head_dim: int
) -> list[Tensor]:
    q = torch.randn(batch, heads[0], seq_q, head_dim, device="cuda", dtype=BF16)
    k, v = torch.randn(2, batch, seq, heads[1], head_dim, device="cuda", dtype=BF16).transpose(2, 3)
    lengths = torch.randint(1, seq + 1, (batch,), device="cuda", dtype=torch.int32)
    lengths[0] = seq
    return [q, k, v, lengths]


def in_pages(cache: Tensor, page: int, order: Tensor) -> Tensor:
    """Cut (B, Hkv, S, D) into pages, page number order[i] holding the i-th; NaN in spare ones."""
    batch, heads, seq, head_dim = cache.shape
    pages = cache.transpose(1, 2).reshape(batch * seq // page, page, heads, head_dim)
    out = torch.full((len(order), page, heads, head_dim), torch.nan, device="cuda", dtype=BF16)
    out[order[: len(pages)].long()] = pages
    return out.transpose(1, 2)


@pytest.mark.parametrize("seq_q", [1, 5])
@pytest.mark.parametrize(
    ("heads", "head_dim", "seq"),
    [((32, 8), 128, 2048), ((8, 8), 64, 777), ((16, 1), 256, 513), ((28, 4), 96, 1000)],
)
def test_bf16_errs_at_most_twice_as_much_as_plain_torch(
    heads: tuple[int, int], head_dim: int, seq: int, seq_q: int, as_good_as_plain: Check
) -> None:
    inputs = make_inputs(3, heads, seq_q, seq, head_dim)
    exact = reference_decode(*inputs)
    plain = reference_decode(*inputs, dtype=BF16)
    for splits in (None, 1):
        as_good_as_plain("out", decode_attention(*inputs, num_splits=splits), exact, plain)


@pytest.mark.parametrize("page", [16, 64, 192])
def test_pages_out_of_order_beside_stale_ones(page: int, as_good_as_plain: Check) -> None:
    q, k, v, lengths = make_inputs(4, (32, 8), 1, 1536, 128)
    order = torch.randperm(4 * 1536 // page + 9, device="cuda", dtype=torch.int32)
    table = order[: 4 * 1536 // page].view(4, -1)
    k_pages, v_pages = (in_pages(t, page, order) for t in (k, v))
    ours = decode_attention(q, k_pages, v_pages, lengths, block_table=table)
    exact, plain = (reference_decode(q, k, v, lengths, dtype=d) for d in (torch.float64, BF16))
    as_good_as_plain("out", ours, exact, plain)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("per_token", "seq_q", "head_dim", "window"),
    [(False, 1, 128, None), (True, 1, 128, 300), (True, 20, 64, None), (False, 3, 256, 300),
     (False, 1, 96, None), (True, 2, 33, None)],
)  # fmt: skip
def test_one_byte_caches(
    per_token: bool, seq_q: int, head_dim: int, window: int | None, dtype: torch.dtype,
    as_good_as_plain: Check,
) -> None:  # fmt: skip
    q, k, v, lengths = make_inputs(4, (32, 8), seq_q, 1000, head_dim)
    k, v = ((t.float() * 30).to(dtype) for t in (k, v))
    shape = (4, 8, 1000) if per_token else (8,)
    options: dict[str, Any] = {
        n: torch.rand(shape, device="cuda") / 30 for n in ("k_scale", "v_scale")
    }
    ours = decode_attention(q, k, v, lengths, window=window, **options)
    exact = reference_decode(q, k, v, lengths, window=window, **options)
    plain = reference_decode(q, k, v, lengths, window=window, dtype=BF16, **options)
    as_good_as_plain("out", ours, exact, plain)


@pytest.mark.parametrize("page", [16, 64, 192])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_one_byte_caches_in_pages(dtype: torch.dtype, page: int) -> None:
    """Pages in order are the contiguous cache in pieces: alike up to the order of sums."""
    q, k, v, lengths = make_inputs(4, (32, 8), 1, 1536, 128)
    k, v = ((t.float() * 30).to(dtype) for t in (k, v))
    scales = {n: torch.rand(8, device="cuda") / 30 for n in ("k_scale", "v_scale")}
    expected = decode_attention(q, k, v, lengths, **scales)
    k, v = (t.transpose(1, 2).reshape(-1, page, 8, 128).transpose(1, 2) for t in (k, v))
    table = torch.arange(len(k), device="cuda", dtype=torch.int32).view(4, -1)
    paged = decode_attention(q, k, v, lengths, block_table=table, **scales)
    torch.testing.assert_close(paged, expected, rtol=1e-2, atol=1e-3)


def test_more_than_two_to_the_31_elements() -> None:
    """Pages beyond 2^31 elements of the pool, and the same in the contiguous cache."""
    q, k, v, _ = make_inputs(34, (8, 8), 1, 65536, 128)
    assert k.numel() > 2**31
    lengths = torch.full((34,), 65536, device="cuda", dtype=torch.int32)
    out = decode_attention(q, k, v, lengths)
    last = decode_attention(q[-1:], k[-1:], v[-1:], lengths[-1:])
    torch.testing.assert_close(out[-1:], last, rtol=2e-2, atol=1e-3)
    count = 34 * 65536 // 64
    k_pages, v_pages = (
        t.transpose(1, 2).reshape(count, 64, 8, 128).transpose(1, 2) for t in (k, v)
    )
    table = torch.arange(count, device="cuda", dtype=torch.int32).view(34, -1)
    paged = decode_attention(q, k_pages, v_pages, lengths, block_table=table)
    torch.testing.assert_close(paged, out, rtol=2e-2, atol=1e-3)


def test_repeats_are_equal_to_the_bit_whatever_memory_held() -> None:
    """Stale NaN in every buffer that the allocator hands out again, lengths that leave splits empty."""
    q, k, v, _ = make_inputs(3, (32, 8), 1, 4096, 128)
    lengths = torch.tensor([4096, 0, 100], device="cuda", dtype=torch.int32)
    first = decode_attention(q, k, v, lengths, num_splits=16)
    assert not first[1].any()
    for _ in range(200):
        poison = torch.full((1 << 20,), torch.nan, device="cuda")
        del poison
        assert torch.equal(decode_attention(q, k, v, lengths, num_splits=16), first)


def test_pages_with_chosen_splits_repeat_under_stale_memory() -> None:
    """A hundred steps of growing rows (torchtitan issue 3235: NaN in one of a hundred)."""
    q, k, v, _ = make_inputs(3, (32, 8), 1, 4096, 128)
    order = torch.randperm(3 * 4096 // 16, device="cuda", dtype=torch.int32)
    k_pages, v_pages = (in_pages(t, 16, order) for t in (k, v))
    for step in range(100):
        lengths = torch.tensor([1 + step, 41 * step, 4096 - step], device="cuda", dtype=torch.int32)
        poison = torch.full((1 << 20,), torch.nan, device="cuda")
        del poison
        out = decode_attention(q, k_pages, v_pages, lengths, block_table=order.view(3, -1))
        expected = decode_attention(q, k, v, lengths)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("num_splits", [1, 16])
def test_its_bytes_are_the_output_and_the_parts(num_splits: int) -> None:
    q, k, v, lengths = make_inputs(4, (32, 8), 1, 4096, 128)
    decode_attention(q, k, v, lengths, num_splits=num_splits)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decode_attention(q, k, v, lengths, num_splits=num_splits)
    parts = 4 * (128 + 1) * num_splits * 4 * 32 if num_splits > 1 else 0
    assert torch.cuda.max_memory_allocated() - before == q.nbytes + parts
