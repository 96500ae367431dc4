"""Causal linear attention on a real GPU: bf16, its bytes, more than 2^31 elements, repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear_attention.reference import reference_linear_attention
from kernels.linear_attention.triton import causal_linear_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def make_inputs(batch: int, heads: tuple[int, int], seq: int, head_dim: int) -> list[Tensor]:
    counts = (heads[0], heads[1], heads[1], heads[0])
    rows = [torch.randn(batch, seq, n, head_dim, device="cuda", dtype=BF16) for n in counts]
    return [row.transpose(1, 2) for row in rows]


def results(attention: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(out.dtype))]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bf16_errs_at_most_twice_as_much_as_plain_torch(
    head_dim: int, as_good_as_plain: Callable[..., None]
) -> None:
    inputs = make_inputs(2, (4, 2), 1000, head_dim)
    ours = results(causal_linear_attention, inputs)
    exact = results(reference_linear_attention, [t.double() for t in inputs])
    plain = results(reference_linear_attention, inputs, dtype=BF16)
    for name, *values in zip(("out", "dQ", "dK", "dV"), ours, exact, plain, strict=True):
        as_good_as_plain(name, *values)
    for _ in range(3):
        again = results(causal_linear_attention, inputs)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_its_bytes_are_results_sums_and_two_sets_of_states() -> None:
    inputs = make_inputs(2, (8, 4), 4096, 64)
    results(causal_linear_attention, inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(causal_linear_attention, inputs)
    q_bytes, k_bytes = inputs[0].nbytes, inputs[1].nbytes
    states = 4 * 64 * 65 * (4096 // 64) * 2 * 4
    # out, dQ, dK, dV; 1 / sums; S and z are alive until R and r are there.
    expected = 2 * q_bytes + 2 * k_bytes + 4 * 2 * 8 * 4096 + 2 * states
    assert torch.cuda.max_memory_allocated() - before == expected


def test_more_than_two_to_the_31_elements() -> None:
    inputs = make_inputs(65, (8, 1), 65_600, 64)
    assert inputs[0].numel() > 2**31
    out = causal_linear_attention(*inputs[:3])
    last = causal_linear_attention(*(tensor[-1:] for tensor in inputs[:3]))
    assert torch.equal(out[-1:], last)
