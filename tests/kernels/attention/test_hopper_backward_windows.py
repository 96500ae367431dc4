"""Gradients of windows by the fused Hopper backward, on a Hopper GPU, against float64.

Every call is forced onto `hopper`, so that none of these tests passes on another kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import masks
from kernels.attention.dispatch import Backend, Direction, forced_backend, last_choice
from kernels.attention.masks import Mask, MaskKind
from kernels.attention.triton import attention_backward, flash_attention
from tests.kernels.attention.conftest import WINDOWS, Case, by_position

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
BF16, FP16 = torch.bfloat16, torch.float16
SEQS = [
    *[(1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (128, 217), (108, 256)],
    *[(384, 256), (640, 128), (65, 129), (700, 700), (1, 513), (128, 1000), (1000, 128)],
]
NAMES = [name for name, (mask, _) in WINDOWS.items() if mask.kind is MaskKind.WINDOW]
Check = Callable[..., None]


@pytest.fixture(autouse=True)
def forced_hopper() -> Iterator[None]:
    with forced_backend("hopper"):
        yield


def draw(
    batch: int, heads: tuple[int, int], seqs: tuple[int, int], head_dim: int, dtype: Any = BF16
) -> list[Tensor]:
    """Return random q, k, v, laid out as transformers has them."""
    shapes = [(seqs[0], heads[0]), (seqs[1], heads[1]), (seqs[1], heads[1])]
    rows = [torch.randn(batch, *s, head_dim, device="cuda").to(dtype) for s in shapes]
    return [row.transpose(1, 2) for row in rows]


def within(left: int, right: int, seqs: tuple[int, int]) -> Case:
    visible = by_position(seqs, "cuda", lambda i, j: (j >= i - left) & (j <= i + right))
    return Case(mask=masks.window(left, right), visible=visible)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_every_length_matches_float64(
    name: str, head_dim: int, window_case: Callable[..., Case], assert_masked_accurate: Check
) -> None:
    for seqs in SEQS:
        for heads in ((4, 4), (6, 2)):
            inputs = draw(2, heads, seqs, head_dim)
            assert_masked_accurate(*inputs, window_case(name, seqs, "cuda"))
    choice = last_choice(Direction.BACKWARD)
    assert choice is not None and choice.backend is Backend.HOPPER


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left", [62, 63, 64, 65, 126, 127, 128, 191, 300, 1023])
def test_windows_that_end_on_and_beside_tiles(
    left: int, head_dim: int, assert_masked_accurate: Check
) -> None:
    for seqs in ((1024, 1024), (1023, 1024), (900, 1031)):
        assert_masked_accurate(*draw(1, (2, 1), seqs, head_dim), within(left, 0, seqs))


@pytest.mark.parametrize(("dtype", "head_dim"), [(FP16, 64), (FP16, 128), (BF16, 40), (BF16, 96)])
def test_types_and_padded_heads(
    dtype: torch.dtype, head_dim: int, assert_masked_accurate: Check
) -> None:
    inputs = draw(1, (4, 2), (500, 613), head_dim, dtype)
    assert_masked_accurate(*inputs, within(100, 30, (500, 613)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_with_sinks_and_an_expanded_gradient(
    head_dim: int, assert_masked_accurate: Check
) -> None:
    seqs = (777, 777)
    inputs, case = draw(2, (8, 2), seqs, head_dim), within(127, 0, seqs)
    sinks = torch.linspace(-2.0, 1.0, 8, device="cuda")
    assert_masked_accurate(*inputs, case, sinks=sinks)
    dout = torch.randn(1, 1, 1, head_dim, device="cuda", dtype=BF16).expand_as(inputs[0])
    assert_masked_accurate(*inputs, case, dout=dout)


def test_a_model_window_in_a_long_sequence(assert_masked_accurate: Check) -> None:
    seqs = (4224, 4224)
    assert_masked_accurate(*draw(1, (2, 1), seqs, 128), within(1023, 0, seqs))


def gradients(inputs: list[Tensor], mask: Mask, dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(flash_attention(*leaves, mask=mask), leaves, dout)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_busy_gpu_repeats_dk_and_dv(head_dim: int) -> None:
    inputs = draw(60, (8, 4), (700, 700), head_dim)
    dout = torch.randn_like(inputs[0])
    dq, *first = gradients(inputs, masks.window(300), dout)
    for _ in range(20):
        again, *rest = gradients(inputs, masks.window(300), dout)
        assert all(torch.equal(a, b) for a, b in zip(first, rest, strict=True))
        torch.testing.assert_close(again, dq, rtol=2**-7, atol=1e-2 * dq.float().std().item())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_that_hides_nothing_is_the_causal_mask(head_dim: int) -> None:
    q, k, v = draw(2, (4, 2), (300, 413), head_dim)
    lse = torch.rand(2, 4, 300, device="cuda") + 6
    arguments = (torch.randn_like(q), q, k, v, lse, torch.randn_like(lse), True, 0.1)
    causal = attention_backward(*arguments)
    window = attention_backward(*arguments, "window", [412, 0, 0, 0])
    assert all(torch.equal(a, b) for a, b in zip(causal[1:], window[1:], strict=True))
    narrower = attention_backward(*arguments, "window", [411, 0, 0, 0])
    assert not torch.equal(causal[2], narrower[2])
