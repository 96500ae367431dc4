"""Writing into a cache against plain indexing: pages, short rows, one-byte values and scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode.append import append_to_cache
from kernels.decode.reference import gathered_cache, reference_append

FP16, FP8, INT8 = torch.float16, torch.float8_e4m3fn, torch.int8


def make_cache(dtype: torch.dtype, page: int | None, device: str) -> dict[str, Any]:
    """A cache of 3 rows of 24 tokens and 2 heads, all NaN or 0; pages in a mixed order."""
    shape = (3, 24, 2, 20) if page is None else (3 * 24 // page + 2, page, 2, 20)
    one_byte = dtype in (FP8, INT8)
    cache: dict[str, Any] = {}
    for name in ("k", "v"):
        filled = torch.zeros(shape) if one_byte else torch.full(shape, torch.nan)
        cache[name] = filled.to(device, dtype).transpose(1, 2)
        if one_byte:
            cache[f"{name}_scale"] = torch.zeros(shape[:3], device=device).transpose(1, 2)
    if page is not None:
        order = torch.randperm(shape[0])[: 3 * 24 // page]
        cache["block_table"] = order.view(3, -1).to(device, torch.int32)
    return cache


def stored(cache: dict[str, Any], name: str) -> Tensor:
    return gathered_cache(cache[name], cache.get("block_table"), cache.get(f"{name}_scale"))


@pytest.mark.parametrize("dtype", [FP16, FP8, INT8])
@pytest.mark.parametrize("page", [None, 8])
def test_new_tokens_land_at_the_end_of_their_rows(
    page: int | None, dtype: torch.dtype, device: str
) -> None:
    """Rows of 24, 7 and 2 tokens get 3 new ones: the last row's first new token has no place."""
    torch.manual_seed(0)
    ours = make_cache(dtype, page, device)
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    k_new, v_new = torch.randn(2, 3, 3, 2, 20, device=device).to(FP16).transpose(2, 3)
    lengths = torch.tensor([24, 7, 2], device=device, dtype=torch.int32)
    append_to_cache(k_new, v_new, lengths=lengths, **ours)
    reference_append(k_new, v_new, lengths=lengths, **theirs)
    for name, tensor in ours.items():
        # Triton's interpreter loses the carry where rounding to fp8 reaches the next power of two; on a
        # GPU it divides less exactly than torch, so scales and ties may differ: see the bounds below.
        if device == "cpu" and tensor.dtype != FP8:
            assert torch.equal(tensor.nan_to_num(-9.0), theirs[name].nan_to_num(-9.0))
    exact = {"k": k_new, "v": v_new}
    # Of e4m3 the last of 3 mantissa bits is half a step off at most, 1/16 of a value; of int8 half
    # of a 127th of the row's largest.
    for name in ("k", "v"):
        for row, first in enumerate((21, 4, 0)):
            new = exact[name][row, :, -min(3, lengths[row]) :].double()
            largest = new.abs().amax(-1, keepdim=True)
            allowed = {FP16: 0 * new, FP8: new.abs() / 16 + largest / 2**17, INT8: largest / 254}
            for cache in (theirs,) if dtype == FP8 and device == "cpu" else (ours, theirs):
                got = stored(cache, name)[row, :, first : first + new.shape[1]]
                assert ((got - new).abs() <= allowed[dtype] * 1.001).all()


def test_a_row_of_zeros_and_a_row_of_no_tokens(device: str) -> None:
    cache = make_cache(INT8, None, device)
    new = torch.zeros(3, 2, 1, 20, device=device, dtype=FP16)
    before = cache["k"].clone()
    append_to_cache(new, new, lengths=torch.tensor([0, 1, 5], device=device), **cache)
    assert torch.equal(cache["k"], before)
    assert not cache["k_scale"].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_new": torch.zeros(3, 3, 1, 20)}, r"k_new has shape .*; it must be \(B, 2, Sq, 20\)"),
        ({"lengths": torch.zeros(2).int()}, "lengths has shape"),
        ({"k_scale": torch.ones(3, 2, 24)}, "k_scale is given for a cache of torch.float32"),
        ({"block_table": torch.zeros(3, 1).long()}, "block_table has dtype torch.int64"),
        ({"block_table": torch.zeros(2, 1).int()}, r"block_table has shape \(2, 1\); it must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    new, cache = torch.zeros(3, 2, 1, 20), torch.zeros(3, 2, 24, 20)
    valid = {"k_new": new, "v_new": new, "k": cache, "v": cache, "lengths": torch.ones(3).int()}
    with pytest.raises(ValueError, match=message):
        append_to_cache(**(valid | change))
