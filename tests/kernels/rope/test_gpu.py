"""The rotary embedding on a real GPU: bf16, its bytes, more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.rope.reference import reference_rope
from kernels.rope.triton import apply_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def states(batch: int, heads: int, seq: int, head_dim: int) -> Tensor:
    return torch.randn(batch, seq, heads, head_dim, device="cuda", dtype=BF16).transpose(1, 2)


@pytest.mark.parametrize(("head_dim", "turned"), [(128, 128), (64, 64), (96, 24), (256, 256)])
def test_bf16_errs_at_most_twice_as_much_as_plain_torch(
    head_dim: int, turned: int, as_good_as_plain: Callable[..., None]
) -> None:
    q, k = states(2, 24, 333, head_dim), states(2, 3, 333, head_dim)
    cos, sin = torch.randn(2, 1, 333, turned, device="cuda", dtype=BF16)
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    ours = apply_rope(*leaves, cos, sin)
    grads = torch.autograd.grad(ours, leaves, (q, k))
    for x, out, grad in zip((q, k), ours, grads, strict=True):
        exact_leaf, plain_leaf = x.double().requires_grad_(), x.detach().requires_grad_()
        exact = reference_rope(exact_leaf, cos, sin)
        plain = reference_rope(plain_leaf, cos, sin, dtype=BF16)
        as_good_as_plain("out", out, exact, plain)
        (exact_grad,) = torch.autograd.grad(exact, exact_leaf, x.double())
        (plain_grad,) = torch.autograd.grad(plain, plain_leaf, x)
        as_good_as_plain("grad", grad, exact_grad, plain_grad)


def test_its_bytes_are_its_results() -> None:
    q, k = states(2, 32, 2048, 128), states(2, 8, 2048, 128)
    cos, sin = torch.randn(2, 1, 2048, 128, device="cuda", dtype=BF16)
    apply_rope(q, k, cos, sin)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    apply_rope(q, k, cos, sin)
    assert torch.cuda.max_memory_allocated() - before == q.nbytes + k.nbytes


def test_more_than_two_to_the_31_elements() -> None:
    q, k = states(33, 64, 8192, 128), states(33, 1, 8192, 128)
    assert q.numel() > 2**31
    cos, sin = torch.randn(2, 1, 8192, 128, device="cuda", dtype=BF16)
    whole = apply_rope(q, k, cos, sin)
    last = apply_rope(q[-1:], k[-1:], cos, sin)
    assert all(torch.equal(a[-1:], b) for a, b in zip(whole, last, strict=True))
