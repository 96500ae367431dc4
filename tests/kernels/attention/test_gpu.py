"""The compiled kernels on a real GPU, in bf16: the same rule on larger shapes, races, overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.attention import dispatch
from kernels.attention.triton import flash_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
SEQS = [
    *[(1, 1), (64, 128), (239, 1), (799, 3), (113, 203), (108, 256), (384, 256), (640, 128)],
    *[(1024, 1024), (1023, 1024), (1024, 1023)],
]
Check = Callable[..., None]
Make = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True)
def portable_kernels() -> Iterator[None]:
    """Keep these tests on the portable kernels where a Hopper GPU has others."""
    with dispatch.forced_backend("triton"):
        yield


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("seqs", SEQS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_length_matches_float64(
    head_dim: int,
    seqs: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    make_inputs: Make,
    assert_accurate: Check,
) -> None:
    assert_accurate(*make_inputs(2, heads, seqs, head_dim, BF16), causal)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 60, 64, 80, 96, 100, 128, 160, 192, 256])
def test_every_head_size_matches_float64(
    head_dim: int, dtype: torch.dtype, make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(1, (4, 2), (300, 413), head_dim, dtype), causal=True)


@pytest.mark.parametrize("seq", [2048, 4096, 4224])
def test_long_sequences_match_float64(seq: int, make_inputs: Make, assert_accurate: Check) -> None:
    assert_accurate(*make_inputs(1, (2, 1), (seq, seq), 128, BF16), causal=True)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_busy_gpu_repeats_every_bit(head_dim: int, causal: bool, make_inputs: Make) -> None:
    q, k, v = make_inputs(60, (8, 4), (512, 512), head_dim, BF16)
    dout = torch.randn_like(q)

    def run() -> tuple[Tensor, ...]:
        out = flash_attention(q, k, v, causal=causal)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize(
    ("batch", "heads", "seq"), [(33, 64, 8192), (17000, 1, 1024)], ids=["long", "many"]
)
def test_more_than_two_to_the_31_elements(batch: int, heads: int, seq: int) -> None:
    shape = (batch, seq, heads, 128)
    assert torch.Size(shape).numel() > 2**31

    def make(heads: int) -> Tensor:
        rows = torch.empty(batch, seq, heads, 128, dtype=BF16, device="cuda").normal_()
        return rows.transpose(1, 2).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out = flash_attention(q, k, v, causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    inputs = [make(heads), make(1), make(1), make(heads).detach()]
    whole = run(*inputs)
    last = run(*(tensor[-1:].detach().clone().requires_grad_() for tensor in inputs))
    assert all(torch.equal(a[-1:], b) for a, b in zip(whole, last, strict=True))


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_more_than_65535_heads_of_a_batch(backend: str) -> None:
    """28,800 x 15 heads of 16 tokens (FlashAttention issue 1311): no dimension of a grid holds them."""
    rows = [torch.randn(28800, 16, 15, 72, device="cuda", dtype=BF16) for _ in range(4)]
    inputs = [row.transpose(1, 2) for row in rows]

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        out = flash_attention(q, k, v, causal=True)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)

    with dispatch.forced_backend(backend):
        whole, last = run(*inputs), run(*(tensor[-1:].clone() for tensor in inputs))
    names = ("out", "dq", "dk", "dv")
    for name, a, b in zip(names, whole, last, strict=True):
        if name == "dq" and backend == "auto":  # summed up in no fixed order there
            torch.testing.assert_close(a[-1:], b, rtol=2**-7, atol=1e-2)
        else:
            assert torch.equal(a[-1:], b), name


def test_the_current_stream_and_device_are_used(make_inputs: Make) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(1, (2, 2), (256, 256), 64, BF16))
    expected = flash_attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = flash_attention(q, k, v, causal=True)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_no_score_matrix_is_allocated(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (4, 4), (8192, 8192), 64, BF16)
    dout = torch.randn_like(q)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = flash_attention(q, k, v, causal=True)
    torch.autograd.grad(out, (q, k, v), dout)
    rows_bytes, row_values_bytes = q.numel() * 2, 4 * 8192 * 4
    # out, dq, dk, dv, and lse and delta; every size here is a multiple of the allocator's 512.
    expected = 4 * rows_bytes + 2 * row_values_bytes
    assert torch.cuda.max_memory_allocated() - before == expected
