"""The Hopper forward for windows, large and unequal heads on a real GPU, against float64.

Every call is forced onto `hopper`, so that none of these tests passes on another kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import dispatch, masks
from kernels.attention.dispatch import Backend, Direction
from kernels.attention.masks import Mask
from kernels.attention.reference import reference_attention
from kernels.attention.schedule import single_tile
from kernels.attention.triton import flash_attention_with_lse
from tests.kernels.attention.conftest import Case, by_position

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
BF16 = torch.bfloat16
SEQS = [
    *[(1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (108, 256)],
    *[(384, 256), (640, 128), (1024, 1024), (1023, 1024), (1, 1000), (193, 193), (300, 1413)],
]
BOUNDS = [(None, None), (None, 0), (0, 0), (63, 0), (127, 0), (300, 0), (40, 50), (40, None)]
# By head size of keys and of values: each tile, and heads that do not fill theirs.
SIZES = [(64, 64), (128, 128), (256, 256), (192, 128), (160, 96), (40, 64), (200, 200)]


@pytest.fixture(autouse=True)
def forced_hopper() -> Iterator[None]:
    with dispatch.forced_backend("hopper"):
        yield


def draw(batch: int, heads: int, seq: int, head_dim: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(batch, seq, heads, head_dim, device="cuda").to(dtype).transpose(1, 2)


def make_case(bounds: tuple[int | None, int | None], seqs: tuple[int, int]) -> Case:
    left, right = (10**6 if bound is None else bound for bound in bounds)
    visible = by_position(seqs, "cuda", lambda i, j: (j >= i - left) & (j <= i + right))
    return Case(mask=masks.window(*bounds), visible=visible)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return flash_attention_with_lse(q, k, v, mask=mask, **options)


def assert_forward(q: Tensor, k: Tensor, v: Tensor, case: Case, **options: Any) -> None:
    """Hold out and lse to float64: at most twice the error of plain attention in the same dtype."""
    out, lse = attend(q, k, v, case.mask, **options)
    exact, exact_lse = reference_attention(q, k, v, visible=case.visible, **options)
    options["dtype"] = q.dtype
    plain, _ = reference_attention(q, k, v, visible=case.visible, **options)
    assert out.isfinite().all()
    rounded = exact.to(q.dtype)
    allowance = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    limit = 2 * (plain.double() - exact).abs().max().item() + allowance
    error = (out.double() - exact).abs().max().item()
    assert error <= limit, f"out errs by {error}, allowed {limit}"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_length_matches_float64(
    sizes: tuple[int, int], bounds: tuple[int | None, int | None]
) -> None:
    head_dim, value_dim = sizes
    for seqs in SEQS:
        q, k = draw(2, 6, seqs[0], head_dim), draw(2, 2, seqs[1], head_dim)
        assert_forward(q, k, draw(2, 2, seqs[1], value_dim), make_case(bounds, seqs))


@pytest.mark.parametrize("sizes", SIZES)
def test_fp16_and_huge_logits(sizes: tuple[int, int]) -> None:
    for dtype, spread in ((torch.float16, 1.0), (BF16, 30.0)):
        q, k = (draw(1, heads, 512, sizes[0], dtype) * spread for heads in (4, 2))
        assert_forward(q, k, draw(1, 2, 512, sizes[1], dtype), make_case((100, 0), (512, 512)))


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("bounds", [(None, 0), (100, 0)])
def test_softcap_and_sinks(sizes: tuple[int, int], bounds: tuple[int | None, int]) -> None:
    sinks = torch.tensor([-torch.inf, 0.0, 5.0, -2.0], device="cuda")
    for seqs in ((300, 413), (384, 256)):
        q, k = draw(2, 4, seqs[0], sizes[0]), draw(2, 2, seqs[1], sizes[0])
        v, case = draw(2, 2, seqs[1], sizes[1]), make_case(bounds, seqs)
        assert_forward(q, k, v, case, sinks=sinks)
        assert_forward(q, k, v, case, sinks=sinks.to(BF16))
        assert_forward(q * 8, k * 8, v, case, softcap=20.0)
        assert_forward(q, k, v, case, softcap=20.0, sinks=sinks)


def test_a_model_window_in_a_long_sequence() -> None:
    q, k, v = (draw(1, 2, 4224, 128) for _ in range(3))
    assert_forward(q, k, v, make_case((1023, 0), (4224, 4224)))


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_nan_past_the_end_stays_out(sizes: tuple[int, int]) -> None:
    """Rows after the last query and key lie in the same memory, and hold NaN."""
    whole = [draw(2, 4, 512, head_dim) for head_dim in (sizes[0], *sizes)]
    cut = [tensor[:, :, :300] for tensor in whole]
    mask = masks.window(100)
    expected = attend(*(tensor.clone() for tensor in cut), mask)
    for tensor in whole:
        tensor[:, :, 300:] = math.nan
    assert all(torch.equal(a, b) for a, b in zip(attend(*cut, mask), expected, strict=True))


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_busy_gpu_repeats_every_bit(sizes: tuple[int, int]) -> None:
    q = draw(60, 8, 700, sizes[0])
    k, v = (draw(60, 4, 700, head_dim) for head_dim in sizes)
    assert 60 * 8 * -(-700 // single_tile(*sizes).rows) > 10 * 132
    mask = masks.window(300)
    first = attend(q, k, v, mask)
    for _ in range(20):
        repeated = attend(q, k, v, mask)
        assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    alone = attend(q[37:38], k[37:38], v[37:38], mask)
    assert torch.equal(alone[0], first[0][37:38])


def test_more_than_two_to_the_31_elements() -> None:
    shape = (33, 8192, 64, 128)
    assert torch.Size(shape).numel() > 2**31
    q = torch.empty(shape, dtype=BF16, device="cuda").normal_().transpose(1, 2)
    kv = torch.empty(2, 33, 8192, 1, 128, dtype=BF16, device="cuda").normal_().transpose(2, 3)
    mask = masks.window(1000)
    whole = attend(q, kv[0], kv[1], mask)
    last = attend(*(tensor[-1:].clone() for tensor in (q, kv[0], kv[1])), mask)
    assert all(torch.equal(a[-1:], b) for a, b in zip(whole, last, strict=True))


def test_it_allocates_out_and_lse_alone() -> None:
    q, k, v = draw(3, 4, 2048, 192), draw(3, 4, 2048, 192), draw(3, 4, 2048, 128)
    attend(q, k, v, masks.CAUSAL)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(q, k, v, masks.CAUSAL)
    assert torch.cuda.max_memory_allocated() - before == v.numel() * 2 + 3 * 4 * 2048 * 4
    assert dispatch.last_choice(Direction.FORWARD) == dispatch.Choice(Backend.HOPPER, None)


def test_the_gradients_of_the_portable_backward_fit_its_lse(
    assert_masked_accurate: Callable[..., None],
) -> None:
    case = make_case((100, 0), (300, 413))
    with dispatch.forced_backend("auto"):
        for head_dim, value_dim in ((128, 128), (192, 128)):
            q, k = draw(2, 4, 300, head_dim), draw(2, 2, 413, head_dim)
            assert_masked_accurate(q, k, draw(2, 2, 413, value_dim), case)
