"""The fused SwiGLU against float64, and what compilers and mistaken callers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.swiglu.reference import reference_swiglu
from kernels.swiglu.triton import swiglu, swiglu_forward

Check = Callable[[str, Tensor, Tensor, Tensor], None]
FP16, FP32 = torch.float16, torch.float32


def results(gated: Callable[..., Tensor], gate: Tensor, up: Tensor, grad: Tensor, **options: Any):
    gate, up = (t.detach().requires_grad_() for t in (gate, up))
    out = gated(gate, up, **options)
    return [out.detach(), *torch.autograd.grad(out, (gate, up), grad.to(out.dtype))]


@pytest.fixture
def assert_accurate(as_good_as_plain: Check) -> Callable[..., None]:
    def check(gate: Tensor, up: Tensor, grad: Tensor) -> None:
        ours = results(swiglu, gate, up, grad)
        exact = results(reference_swiglu, gate.double(), up.double(), grad)
        plain = results(reference_swiglu, gate, up, grad, dtype=gate.dtype)
        for name, *values in zip(("out", "dGate", "dUp"), ours, exact, plain, strict=True):
            as_good_as_plain(name, *values)

    return check


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 40), (2, 2048), (2, 2051)])
def test_values_and_gradients_match_float64(
    shape: tuple[int, ...], dtype: torch.dtype, assert_accurate: Callable[..., None], device: str
) -> None:
    torch.manual_seed(shape[-1])
    assert_accurate(*(torch.randn(3, *shape, device=device) * 3).to(dtype))


@pytest.mark.parametrize("layout", ["halves", "transposed", "expanded"])
def test_strides_of_any_kind(
    layout: str, assert_accurate: Callable[..., None], device: str
) -> None:
    torch.manual_seed(3)
    gate, up = torch.randn(6, 12, device=device).chunk(2, dim=-1)
    grad = torch.randn(6, 6, device=device)
    if layout == "transposed":
        gate, grad = gate.t(), grad.t()
    elif layout == "expanded":
        up, grad = up[:1].expand(6, 6), grad[:1, :1].expand(6, 6)
    assert_accurate(gate, up, grad)


def test_large_gates_neither_overflow_nor_give_nan(device: str) -> None:
    gate = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30], device=device)
    ours = results(swiglu, gate, torch.ones_like(gate), torch.ones_like(gate))
    assert ours[0].tolist() == [0.0, 0.0, 0.0, 200.0, pytest.approx(1e30)]
    assert ours[1].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_nothing_in_gives_nothing_out(device: str) -> None:
    empty = torch.zeros(0, 8, device=device)
    assert [t.shape for t in results(swiglu, empty, empty, empty)] == [(0, 8)] * 3


def test_compiled_and_eager_agree(device: str) -> None:
    gate, up = torch.randn(2, 4, 24, device=device)
    torch.library.opcheck(swiglu_forward, (gate, up), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(swiglu, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(
        results(compiled, gate, up, up), results(swiglu, gate, up, up), strict=True
    ):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.zeros(()), torch.zeros(()), r"gate has shape \(\); it must be \(..., W\)"),
        (
            torch.zeros(3, 8),
            torch.zeros(3, 7),
            r"up has shape \(3, 7\); it must be gate's, \(3, 8\)",
        ),
        (torch.zeros(8).int(), torch.zeros(8).int(), "gate has dtype torch.int32; allowed are"),
        (torch.zeros(8), torch.zeros(8).half(), "up has dtype torch.float16; it must be gate's"),
        (torch.zeros(8), torch.zeros(8, device="meta"), "up is on meta; it must be on gate's"),
    ],
)
def test_wrong_arguments_are_refused_by_name(gate: Tensor, up: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu(gate, up)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="gate is on cpu; it must be on a CUDA device"):
        swiglu(torch.zeros(8), torch.zeros(8))
