"""Masks of every kind on a real GPU, in bf16: larger shapes, races, offsets past 2^31."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import masks
from kernels.attention.dispatch import forced_backend
from kernels.attention.triton import flash_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
Check = Callable[..., None]
Maker = Callable[..., Any]
SEQS = [(512, 512), (1023, 1024), (300, 777), (777, 300), (1, 513)]


@pytest.fixture(autouse=True)
def portable_kernels() -> Iterator[None]:
    """Run the portable kernels, whatever the GPU: those for Hopper have tests of their own."""
    with forced_backend("triton"):
        yield


def draw(heads: tuple[int, int], seqs: tuple[int, int], sizes: tuple[int, int]) -> list[Tensor]:
    """Return random q, k, v of batch 2, laid out as transformers has them."""
    shapes = [(seqs[0], heads[0], sizes[0]), (seqs[1], heads[1], sizes[0])]
    shapes.append((seqs[1], heads[1], sizes[1]))
    torch.manual_seed(sum(seqs))
    return [torch.randn(2, *s, device="cuda", dtype=BF16).transpose(1, 2) for s in shapes]


def block_table(seqs: tuple[int, int], block: int, heads: int = 1) -> Tensor:
    sizes = (heads, *(-(-seq // block) for seq in seqs))
    return torch.rand(1, *sizes, generator=torch.Generator().manual_seed(3)).lt(0.4).cuda()


def test_windows_and_prefixes_match_float64(
    window_name: str, window_case: Maker, assert_masked_accurate: Check
) -> None:
    for seqs in SEQS:
        case = window_case(window_name, seqs, "cuda")
        assert_masked_accurate(*draw((4, 2), seqs, (128, 128)), case)


@pytest.mark.parametrize("right", [0, None])
@pytest.mark.parametrize("left", [None, 100])
def test_documents_match_float64(
    left: int | None, right: int | None, document_case: Maker, assert_masked_accurate: Check
) -> None:
    case = document_case([0, 70, 1, 400, 0, 129, 300, 0], 1000, "cuda", left, right)
    assert_masked_accurate(*draw((4, 2), (1000, 1000), (128, 128)), case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_block_tables_match_float64(
    block: int, causal: bool, block_case: Maker, assert_masked_accurate: Check
) -> None:
    for seqs in ((1024, 1024), (700, 1001)):
        case = block_case(block_table(seqs, block, heads=4), block, seqs, causal=causal)
        assert_masked_accurate(*draw((4, 2), seqs, (128, 128)), case)


@pytest.mark.parametrize(
    "sizes", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128)]
)
def test_head_sizes_softcap_and_sinks_match_float64(
    sizes: tuple[int, int], window_case: Maker, assert_masked_accurate: Check
) -> None:
    seqs = (777, 777)
    sinks = torch.linspace(-2.0, 1.0, 16, device="cuda")
    for case in (window_case("causal", seqs, "cuda"), window_case("window 20", seqs, "cuda")):
        inputs = draw((16, 8), seqs, sizes)
        assert_masked_accurate(*inputs, case, sinks=sinks)
        assert_masked_accurate(*inputs, case, softcap=5.0)


def test_a_busy_gpu_repeats_every_bit(
    window_case: Maker, document_case: Maker, block_case: Maker
) -> None:
    seqs = (512, 512)
    cases = [window_case(name, seqs, "cuda") for name in ("window 20", "global 64, window 3")]
    cases += [document_case([100, 300, 112], 512, "cuda")]
    cases += [block_case(block_table(seqs, 128), 128, seqs)]
    shapes = [(60, 512, heads, 128) for heads in (8, 4, 4, 8)]
    rows = [torch.randn(shape, device="cuda", dtype=BF16).transpose(1, 2) for shape in shapes]
    q, k, v = (tensor.requires_grad_() for tensor in rows[:3])
    for case in cases:

        def run(case: Any = case) -> tuple[Tensor, ...]:
            out = flash_attention(q, k, v, mask=case.mask)
            return out, *torch.autograd.grad(out, (q, k, v), rows[3])

        first = run()
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_more_than_two_to_the_31_elements() -> None:
    seq, heads = 8192, 64
    positions = torch.arange(seq, device="cuda").remainder(3000)[None].expand(33, seq)
    mask, alone = masks.packed(positions), masks.packed(positions[:1])
    rows = [torch.randn(33, seq, n, 128, device="cuda", dtype=BF16) for n in (heads, 1, 1, heads)]
    assert rows[0].numel() > 2**31
    inputs = [row.transpose(1, 2) for row in rows]

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: masks.Mask) -> tuple[Tensor, ...]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        out = flash_attention(q, k, v, mask=mask)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    whole = run(*inputs, mask)
    last = run(*(tensor[-1:].detach().clone() for tensor in inputs), alone)
    assert all(torch.equal(a[-1:], b) for a, b in zip(whole, last, strict=True))


def test_more_than_two_million_tokens_in_a_window() -> None:
    """A sequence of 2^21 + 1 (NATTEN issue 347): its last tokens are those of its end by itself."""
    seq, kept = 2**21 + 1, 2048
    rows = [torch.randn(1, seq, 1, 64, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(4)]
    mask = masks.window(100)

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        out = flash_attention(q, k, v, mask=mask)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    # Both begin with a whole tile, so that sums go by the same tiles.
    start = seq - 1 - 2 * kept
    whole, end = run(*rows), run(*(tensor[:, :, start:].clone() for tensor in rows))
    for a, b in zip(whole, end, strict=True):
        assert torch.equal(a[:, :, -kept:], b[:, :, -kept:])
