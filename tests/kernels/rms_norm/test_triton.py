"""The fused RMS norm against float64, and what compilers and mistaken callers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.rms_norm.reference import reference_rms_norm
from kernels.rms_norm.triton import backward_programs, rms_norm, rms_norm_forward, row_options

Check = Callable[[str, Tensor, Tensor, Tensor], None]
FP16, FP32 = torch.float16, torch.float32


def results(norm: Callable[..., Tensor], x: Tensor, weight: Tensor, grad: Tensor, **options: Any):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    out = norm(x, weight, **options)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad.to(out.dtype))]


@pytest.fixture
def assert_accurate(as_good_as_plain: Check) -> Callable[..., None]:
    def check(x: Tensor, weight: Tensor, grad: Tensor, eps: float = 1e-6) -> None:
        ours = results(rms_norm, x, weight, grad, eps=eps)
        exact = results(reference_rms_norm, x.double(), weight.double(), grad, eps=eps)
        plain = results(reference_rms_norm, x, weight, grad, eps=eps, dtype=x.dtype)
        for name, *values in zip(("out", "dX", "dW"), ours, exact, plain, strict=True):
            as_good_as_plain(name, *values)

    return check


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 40), (7, 64), (2, 1000), (0, 8), (5, 4097)])
def test_values_and_gradients_match_float64(
    shape: tuple[int, ...], dtype: torch.dtype, assert_accurate: Callable[..., None], device: str
) -> None:
    torch.manual_seed(len(shape) * 100 + shape[-1])
    x, grad = torch.randn(2, *shape, device=device).to(dtype)
    if x.numel() == 0:
        empty = results(rms_norm, x, torch.ones(8, dtype=dtype, device=device), grad)
        assert empty[0].shape == shape
        assert empty[2].tolist() == [0.0] * 8
        return
    assert_accurate(x, torch.randn(shape[-1], device=device).to(dtype), grad)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_strides_of_any_kind(
    layout: str, assert_accurate: Callable[..., None], device: str
) -> None:
    torch.manual_seed(3)
    x, grad, weight = torch.randn(6, 6, device=device), torch.randn(6, 6, device=device), None
    weight = torch.randn(12, device=device)[::2]
    if layout == "transposed":
        x, grad = x.t(), grad.t()
    elif layout == "sliced":
        x, grad = (
            torch.randn(12, 9, device=device)[::2, 1:7],
            torch.randn(6, 8, device=device)[:, 2:],
        )
    else:
        grad = grad[:1, :1].expand(6, 6)
    assert_accurate(x, weight, grad)


def test_large_and_zero_rows_stay_finite(assert_accurate: Callable[..., None], device: str) -> None:
    x = torch.randn(3, 32, device=device)
    x[0], x[1] = x[0] * 1e15, 0.0
    assert_accurate(x, torch.ones(32, device=device), torch.ones(3, 32, device=device), eps=1e-5)


def test_nan_stays_in_its_row(device: str) -> None:
    x = torch.randn(3, 16, device=device)
    x[1, 2] = torch.nan
    out = rms_norm(x, torch.ones(16, device=device))
    assert out.isnan().all(-1).tolist() == [False, True, False]


def test_compiled_and_eager_agree(device: str) -> None:
    x, weight = torch.randn(4, 24, device=device), torch.randn(24, device=device)
    torch.library.opcheck(
        rms_norm_forward, (x, weight, 1e-6), test_utils=("test_schema", "test_faketensor")
    )
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(
        results(compiled, x, weight, x), results(rms_norm, x, weight, x), strict=True
    ):
        assert torch.equal(ours, eager)


def test_programs_of_the_backward_are_bounded_by_rows_and_device() -> None:
    assert backward_programs(5, 132) == 5
    assert backward_programs(100_000, 132) == 264
    assert row_options(5120) == {"BLOCK": 8192, "num_warps": 16}


@pytest.mark.parametrize(
    ("x", "weight", "eps", "message"),
    [
        (torch.zeros(3, 8), torch.zeros(7), 1e-6, r"weight has shape \(7,\); it must be x's last"),
        (torch.zeros(3, 8).long(), torch.zeros(8), 1e-6, "x has dtype torch.int64; allowed are"),
        (torch.zeros(3, 8), torch.zeros(8).half(), 1e-6, "weight has dtype torch.float16; it must"),
        (torch.zeros(3, 0), torch.zeros(0), 1e-6, "x has a last dimension of 0; allowed are 1 to"),
        (torch.zeros(3, 8), torch.zeros(8), -1.0, "eps is -1.0; it must be a finite number"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    x: Tensor, weight: Tensor, eps: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, eps=eps)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="x is on cpu; it must be on a CUDA device"):
        rms_norm(torch.zeros(1, 8), torch.zeros(8))
