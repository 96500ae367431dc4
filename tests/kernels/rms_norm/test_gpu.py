"""The RMS norm on a real GPU: bf16, its bytes, more than 2^31 elements, repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.rms_norm.reference import reference_rms_norm
from kernels.rms_norm.triton import backward_programs, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def results(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    out = norm(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad.to(out.dtype))]


def make_inputs(rows: int, width: int) -> list[Tensor]:
    x, grad = (torch.randn(rows, width, device="cuda", dtype=BF16) for _ in range(2))
    return [x, torch.randn(width, device="cuda", dtype=BF16), grad]


@pytest.mark.parametrize(("rows", "width"), [(4099, 4096), (3000, 5120), (777, 16384), (33, 100)])
def test_bf16_errs_at_most_twice_as_much_as_plain_torch(
    rows: int, width: int, as_good_as_plain: Callable[..., None]
) -> None:
    x, weight, grad = make_inputs(rows, width)
    ours = results(lambda x, w: rms_norm(x, w), x, weight, grad)
    exact = results(
        lambda x, w: reference_rms_norm(x, w, eps=1e-6), x.double(), weight.double(), grad
    )
    plain = results(lambda x, w: reference_rms_norm(x, w, eps=1e-6, dtype=BF16), x, weight, grad)
    for name, *values in zip(("out", "dX", "dW"), ours, exact, plain, strict=True):
        as_good_as_plain(name, *values)
    again = results(lambda x, w: rms_norm(x, w), x, weight, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_its_bytes_are_two_tensors_four_per_row_and_a_row_per_program() -> None:
    rows, width = 8192, 4096
    x, weight, grad = make_inputs(rows, width)
    results(rms_norm, x, weight, grad)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(rms_norm, x, weight, grad)
    programs = backward_programs(rows, torch.cuda.get_device_properties(0).multi_processor_count)
    # out and dX, 1 / rms, dW's partial rows and dW.
    expected = 2 * rows * width * 2 + 4 * rows + 4 * programs * width + 2 * width
    assert torch.cuda.max_memory_allocated() - before == expected


def test_more_than_two_to_the_31_elements() -> None:
    x = torch.randn(530_000, 4096, device="cuda", dtype=BF16)
    assert x.numel() > 2**31
    weight = torch.randn(4096, device="cuda", dtype=BF16)
    x.requires_grad_()
    out = rms_norm(x, weight)
    (grad,) = torch.autograd.grad(out, x, out.detach())
    last = x[-3:].detach().requires_grad_()
    small = rms_norm(last, weight)
    assert torch.equal(out[-3:], small)
    assert torch.equal(grad[-3:], torch.autograd.grad(small, last, small.detach())[0])
