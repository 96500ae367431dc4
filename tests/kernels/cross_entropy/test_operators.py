"""What compilers, autocast and mistaken callers see of linear_cross_entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.cross_entropy import triton as fused
from kernels.cross_entropy.triton import linear_cross_entropy, row_options, token_slices


def inputs(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(7, 8, generator=generator).to(device).requires_grad_()
    weight = torch.randn(19, 8, generator=generator).to(device).requires_grad_()
    return hidden, weight, torch.randint(0, 19, (7,), generator=generator).to(device)


def test_the_operators_pass_torchs_own_checks(device: str) -> None:
    hidden, weight, labels = inputs(device)
    options = (4, True, -100, None, torch.float32, True, True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        fused.linear_cross_entropy_forward, (hidden, weight, labels, *options), test_utils=tests
    )
    torch.library.opcheck(fused.scale_in_place, (hidden.detach(), torch.tensor(2.0, device=device)))


def test_compiled_and_eager_agree(device: str) -> None:
    hidden, weight, labels = inputs(device)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return 0.5 * linear_cross_entropy(hidden.sin(), weight, labels, chunk_tokens=4)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    found = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager)


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_inputs(device: str) -> None:
    hidden, weight, labels = inputs(device)
    expected = linear_cross_entropy(hidden.half(), weight.half(), labels, chunk_tokens=4).detach()
    with torch.autocast(device, torch.float16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
    loss.backward()
    assert torch.equal(loss.detach(), expected)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)


def test_chunks_cover_every_token_once() -> None:
    assert token_slices(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert token_slices(0, 3) == []


@pytest.mark.parametrize(("classes", "block"), [(1, 16), (17, 32), (4096, 4096), (128_256, 4096)])
def test_a_rows_tile_is_a_power_of_two(classes: int, block: int) -> None:
    assert row_options(classes)["BLOCK"] == block


def change(**arguments: Any) -> dict[str, Any]:
    """Return arguments that are valid but for the given ones."""
    valid = {"hidden": torch.zeros(3, 8), "weight": torch.zeros(5, 8)}
    return valid | {"labels": torch.zeros(3, dtype=torch.int64), "chunk_tokens": 2} | arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (change(hidden=torch.zeros(1, 3, 8)), r"hidden has shape .*; it must be \(N, H\)"),
        (change(weight=torch.zeros(5, 9)), "weight has 9 columns; it must have hidden's 8"),
        (change(weight=torch.zeros(0, 8)), "weight has 0 rows; there must be at least one class"),
        (change(weight=torch.zeros(5, 8).half()), "weight has dtype torch.float16; it must be hid"),
        (change(hidden=torch.zeros(3, 8).double()), "hidden has dtype torch.float64; allowed are"),
        (change(labels=torch.zeros(4, dtype=torch.int64)), r"labels has shape \(4,\); it must be"),
        (change(labels=torch.zeros(3, dtype=torch.int32)), "labels has dtype torch.int32; allowed"),
        (change(weight=torch.zeros(5, 8, device="meta")), "weight is on meta; it must be on hid"),
        (change(chunk_tokens=0), "chunk_tokens is 0; it must be at least 1"),
        (change(reduction="none"), "reduction is 'none'; allowed are mean, sum"),
        (change(softcap=0.0), "softcap is 0.0; it must be a positive finite number or None"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="hidden is on cpu; it must be on a CUDA device"):
        linear_cross_entropy(**change())
