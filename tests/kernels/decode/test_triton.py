"""Decode attention against float64: splits, groups, pages, one-byte caches, and every edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode.reference import reference_decode
from kernels.decode.triton import decode_attention

Check = Callable[[str, Tensor, Tensor, Tensor], None]
FP16, FP32 = torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def make_inputs(
    batch: int, heads: tuple[int, int], seq_q: int, seq: int, head_dim: int,
    dtype: torch.dtype = FP32, device: str = "cpu",
) -> list[Tensor]:  # fmt: skip
    """q, k, v and lengths of all kinds: full, one, and in between."""
    torch.manual_seed(seq + head_dim)
    q = torch.randn(batch, heads[0], seq_q, head_dim)
    k, v = torch.randn(2, batch, seq, heads[1], head_dim).transpose(2, 3)
    lengths = torch.randint(1, seq + 1, (batch,), dtype=torch.int32)
    lengths[0] = seq
    return [t.to(device, dtype) for t in (q, k, v)] + [lengths.to(device)]


def paged(cache: Tensor, page: int, order: list[int], spare: float) -> tuple[Tensor, Tensor]:
    """Cut (B, Hkv, S, D) into pages in `order`; what no row owns holds `spare`."""
    batch, heads, seq, head_dim = cache.shape
    per_row = -(-seq // page)
    pages = torch.full((len(order), heads, page, head_dim), spare).to(cache.device, cache.dtype)
    table = torch.tensor(order[: batch * per_row], dtype=torch.int32, device=cache.device)
    table = table.view(batch, per_row)
    for row in range(batch):
        for number in range(per_row):
            part = cache[row, :, number * page : (number + 1) * page]
            pages[table[row, number], :, : part.shape[1]] = part
    return pages, table


@pytest.fixture
def assert_accurate(as_good_as_plain: Check) -> Callable[..., None]:
    def check(inputs: list[Tensor], num_splits: int | None = None, **options: Any) -> None:
        ours = decode_attention(*inputs, num_splits=num_splits, **options)
        exact = reference_decode(*inputs, **options)
        plain = reference_decode(*inputs, dtype=inputs[0].dtype, **options)
        as_good_as_plain("out", ours, exact, plain)

    return check


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(
    ("heads", "seq_q", "seq", "head_dim", "num_splits"),
    [((4, 2), 1, 150, 40, 1), ((4, 2), 3, 150, 16, 3), ((2, 2), 1, 1, 8, 1), ((6, 1), 4, 65, 33, 2),
     ((8, 1), 1, 64, 64, 7), ((1, 1), 16, 17, 16, 1)],
)  # fmt: skip
def test_values_match_float64(
    heads: tuple[int, int], seq_q: int, seq: int, head_dim: int, num_splits: int,
    dtype: torch.dtype, assert_accurate: Callable[..., None], device: str,
) -> None:  # fmt: skip
    inputs = make_inputs(3, heads, seq_q, seq, head_dim, dtype, device)
    assert_accurate(inputs, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_empty_splits_and_empty_rows_count_nothing(num_splits: int, device: str) -> None:
    """Rows of 0, 1, 70 and 200 keys in the same splits: most of them are empty for some row."""
    q, k, v, _ = make_inputs(4, (4, 2), 2, 200, 16, device=device)
    lengths = torch.tensor([0, 1, 70, 200], device=device)
    out = decode_attention(q, k, v, lengths, num_splits=num_splits)
    torch.testing.assert_close(
        out.double(), reference_decode(q, k, v, lengths), rtol=1e-5, atol=1e-6
    )
    assert not out[0].any()
    assert not out[1, :, 0].any()  # of two new tokens only the last sees the one key


@pytest.mark.parametrize("page", [64, 16, 5, 1])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_pages_out_of_order_are_the_contiguous_cache(
    page: int, num_splits: int, device: str
) -> None:
    q, k, v, lengths = make_inputs(2, (4, 2), 2, 130, 16, device=device)
    count = 2 * -(-130 // page) + 3
    order = torch.randperm(count).tolist()
    (k_pages, table), (v_pages, _) = (paged(t, page, order, torch.nan) for t in (k, v))
    out = decode_attention(q, k_pages, v_pages, lengths, block_table=table, num_splits=num_splits)
    exact = reference_decode(q, k, v, lengths)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_lies_behind_a_rows_length_is_not_read(poison: float, device: str) -> None:
    q, k, v, _ = make_inputs(2, (4, 2), 1, 130, 16, device=device)
    lengths = torch.tensor([1, 77], device=device)
    clean = decode_attention(q, k, v, lengths, num_splits=2)
    pages, table = {}, None
    for name, cache in (("k", k), ("v", v)):
        cache[0, :, 1:], cache[1, :, 77:] = poison, poison
        pages[name], table = paged(cache, 16, list(range(18)), poison)
    table[0, 1:], table[1, 5:] = -7, 2**30  # page numbers that nobody may follow
    assert torch.equal(decode_attention(q, k, v, lengths, num_splits=2), clean)
    out = decode_attention(q, pages["k"], pages["v"], lengths, block_table=table, num_splits=2)
    assert torch.equal(out, clean)


def test_lengths_beyond_the_cache_read_what_is_there(device: str) -> None:
    q, k, v, _ = make_inputs(2, (2, 1), 1, 40, 16, device=device)
    full = decode_attention(q, k, v, torch.tensor([40, 40], device=device))
    assert torch.equal(
        decode_attention(q, k, v, torch.tensor([41, 2**31 - 1], device=device)), full
    )


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("page", [None, 16, 64])
def test_one_byte_caches_with_scales(
    page: int | None, per_token: bool, dtype: torch.dtype, device: str,
    assert_accurate: Callable[..., None],
) -> None:  # fmt: skip
    """Scales per token span four decades, as outliers make them."""
    q, k, v, lengths = make_inputs(2, (4, 2), 2, 100, 16, FP16, device)
    k, v = ((t.float() * 40).to(dtype) for t in (k, v))
    shape = (2, 2, 100) if per_token else (2,)
    k_scale = torch.rand(shape, device=device) / 40
    v_scale = 10.0 ** -(4 * torch.rand(shape, device=device))
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if page:
        options["k_scale"], options["v_scale"] = (
            paged(t[..., None], page, list(range(14)), torch.nan)[0][..., 0] if per_token else t
            for t in (k_scale, v_scale)
        )
        k, v = (t.float() for t in (k, v))
        (k, table), (v, _) = (paged(t, page, list(range(14)), 0.0) for t in (k, v))
        k, v = (t.to(dtype) for t in (k, v))
        options["block_table"] = table
        # The reference gathers whole pages: what lies behind a length must be a number for it.
        lengths[:] = 100
        options["k_scale"], options["v_scale"] = (
            torch.nan_to_num(options[name], nan=1.0) for name in ("k_scale", "v_scale")
        )
    assert_accurate([q, k, v, lengths], 2, **options)


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(
    ("heads", "seq_q", "head_dim", "splits", "window"),
    # Padded columns, a window, a head size whose pairs are split, more than 16 rows.
    [((4, 1), 2, 40, 2, 70), ((2, 2), 1, 64, 1, None), ((2, 1), 1, 33, 2, 70), ((8, 1), 3, 16, 2, 9)],
)  # fmt: skip
def test_one_byte_caches_of_other_heads_and_windows(
    heads: tuple[int, int], seq_q: int, head_dim: int, splits: int, window: int | None,
    dtype: torch.dtype, device: str, assert_accurate: Callable[..., None],
) -> None:  # fmt: skip
    q, k, v, lengths = make_inputs(2, heads, seq_q, 200, head_dim, FP16, device)
    k, v = ((t.float() * 40).to(dtype) for t in (k, v))
    k[1, :, lengths[1] :], v[1, :, lengths[1] :] = k[0, :, :1], v[0, :, :1]
    scales = {n: torch.rand(heads[1], device=device) / 40 for n in ("k_scale", "v_scale")}
    assert_accurate([q, k, v, lengths], splits, window=window, **scales)


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_every_byte_is_the_number_it_stands_for(dtype: torch.dtype, device: str) -> None:
    """One key in each of four rows of 128 values, which are all bytes, in even and in odd columns."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    every = every[~every.float().isnan()].view(torch.uint8)
    # The second time one column further: each byte stands in an even and in an odd column.
    turns = torch.cat((torch.arange(256), torch.arange(1, 257))) % len(every)
    v = every[turns].view(dtype).view(4, 1, 1, 128).to(device)
    q = torch.zeros(4, 1, 1, 128, dtype=FP16, device=device)
    one = torch.ones(1, device=device)
    lengths = torch.ones(4, dtype=torch.int32, device=device)
    out = decode_attention(q, v, v, lengths, k_scale=one, v_scale=one)
    assert torch.equal(out, v.to(FP16))


def test_huge_queries_do_not_overflow_beside_a_one_byte_cache(device: str) -> None:
    """q near fp16's largest: its products with keys of 400 are far beyond it."""
    q, k, v, lengths = make_inputs(1, (2, 1), 1, 50, 16, FP16, device)
    q *= 1e4
    k, v = ((t.float() * 100).to(FP8) for t in (k, v))
    scales = {"k_scale": torch.full((1,), 1e-6, device=device)}
    scales["v_scale"] = torch.full((1,), 0.01, device=device)
    out = decode_attention(q, k, v, lengths, **scales)
    exact = reference_decode(q, k, v, lengths, **scales)
    torch.testing.assert_close(out.double(), exact, rtol=5e-3, atol=5e-3)


def test_pages_further_away_than_32_bits_are_found(device: str) -> None:
    """Page 1 begins 2^31 elements behind page 0; only what is used is touched."""
    q, k, v, lengths = make_inputs(1, (2, 1), 1, 32, 16, FP16, device)
    storage = torch.zeros(0, dtype=FP16, device=device)
    storage.untyped_storage().resize_((2**31 + 16 * 16) * 2)
    pages = storage.as_strided((2, 1, 16, 16), (2**31, 256, 16, 1))
    pages.copy_(k.view(1, 2, 16, 16).transpose(0, 1))
    near, table = paged(v, 16, [0, 1], 0.0)
    expected = decode_attention(q, k, v, lengths)
    assert torch.equal(decode_attention(q, pages, near, lengths, block_table=table), expected)


@pytest.mark.parametrize("layout", ["batch last", "expanded", "q transposed"])
def test_strides_of_any_kind(
    layout: str, assert_accurate: Callable[..., None], device: str
) -> None:
    q, k, v, lengths = make_inputs(2, (4, 2), 3, 50, 16, device=device)
    if layout == "batch last":
        k, v = (t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for t in (k, v))
    elif layout == "expanded":
        k, v = k[:1].expand(2, 2, 50, 16), v[:, :1].expand(2, 2, 50, 16)
    else:
        q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_accurate([q, k, v, lengths.long()], 2)


def test_a_scale_of_ones_own(assert_accurate: Callable[..., None], device: str) -> None:
    assert_accurate(make_inputs(1, (2, 1), 1, 20, 16, device=device), scale=0.3)


@pytest.mark.parametrize("window", [1, 30, 64, 129, 500])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_window_reads_its_last_keys_alone(window: int, num_splits: int, device: str) -> None:
    """Keys before any query's window, and their pages, hold NaN or belong to nobody."""
    q, k, v, _ = make_inputs(2, (4, 2), 2, 160, 16, device=device)
    lengths = torch.tensor([160, 41], device=device)
    exact = reference_decode(q, k, v, lengths, window=window)
    for row, length in enumerate((160, 41)):
        for cache in (k, v):
            cache[row, :, : max(0, length - 1 - window)] = torch.nan
    options: dict[str, Any] = {"window": window, "num_splits": num_splits}
    out = decode_attention(q, k, v, lengths, **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    (k, table), (v, _) = (paged(t, 16, list(range(20)), torch.nan) for t in (k, v))
    for row, length in enumerate((160, 41)):
        table[row, : max(0, length - 1 - window) // 16] = -7
    out = decode_attention(q, k, v, lengths, block_table=table, **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
