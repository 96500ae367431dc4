"""SwiGLU on a real GPU: bf16, its bytes, more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.swiglu.reference import reference_swiglu
from kernels.swiglu.triton import swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def results(gated: Callable[..., Tensor], gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    gate, up = (t.detach().requires_grad_() for t in (gate, up))
    out = gated(gate, up)
    return [out.detach(), *torch.autograd.grad(out, (gate, up), grad.to(out.dtype))]


@pytest.mark.parametrize("shape", [(1000, 14336), (3, 777, 100)])
def test_bf16_errs_at_most_twice_as_much_as_plain_torch(
    shape: tuple[int, ...], as_good_as_plain: Callable[..., None]
) -> None:
    gate, up, grad = torch.randn(3, *shape, device="cuda", dtype=BF16) * 3
    ours = results(swiglu, gate, up, grad)
    exact = results(reference_swiglu, gate.double(), up.double(), grad)
    plain = results(lambda g, u: reference_swiglu(g, u, dtype=BF16), gate, up, grad)
    for name, *values in zip(("out", "dGate", "dUp"), ours, exact, plain, strict=True):
        as_good_as_plain(name, *values)


def test_its_bytes_are_the_output_and_two_gradients() -> None:
    gate, up, grad = torch.randn(3, 4096, 8192, device="cuda", dtype=BF16)
    results(swiglu, gate, up, grad)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(swiglu, gate, up, grad)
    assert torch.cuda.max_memory_allocated() - before == 3 * gate.nbytes


def test_more_than_two_to_the_31_elements() -> None:
    gate = torch.randn(150_000, 14_336, device="cuda", dtype=BF16)
    assert gate.numel() > 2**31
    whole = results(swiglu, gate, gate, gate)
    last = results(swiglu, gate[-2:], gate[-2:], gate[-2:])
    assert all(torch.equal(a[-2:], b) for a, b in zip(whole, last, strict=True))
