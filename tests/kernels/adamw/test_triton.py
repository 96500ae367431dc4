"""AdamW over a shard: the written-out steps to the bit, torch's within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.adamw import triton as fused
from kernels.adamw.reference import reference_adamw
from kernels.adamw.triton import adamw_step, step_factors

FP16, FP32 = torch.float16, torch.float32
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_shard(count: int, device: str, dtype: torch.dtype = FP32) -> list[Tensor]:
    torch.manual_seed(count)
    parameter, gradient, mean = torch.randn(3, count, device=device)
    return [parameter, gradient.to(dtype), mean / 10, torch.rand(count, device=device) / 10]


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("count", [0, 1, 2048, 5001])
def test_steps_equal_the_written_out_ones_to_the_bit(
    count: int, dtype: torch.dtype, device: str
) -> None:
    shard = make_shard(count, device, dtype)
    copy = torch.empty(count, dtype=FP16, device=device)
    for step in (1, 2, 1000):
        expected = reference_adamw(*shard, step_factors(step=step, **OPTIONS))
        adamw_step(*shard, step=step, copy=copy, **OPTIONS)
        for found, written in zip((shard[0], *shard[2:]), expected, strict=True):
            assert torch.equal(found, written)
        assert torch.equal(copy, expected[0].half())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_follows_torchs_adamw_within_rounding(weight_decay: float, device: str) -> None:
    """Twenty steps of both; the distance stays within a few roundings of the step."""
    options = OPTIONS | {"weight_decay": weight_decay}
    parameter = torch.randn(999, device=device)
    theirs = torch.nn.Parameter(parameter.clone())
    optimizer = torch.optim.AdamW([theirs], fused=True, **options)
    mean, square = torch.zeros(2, 999, device=device)
    for step in range(1, 21):
        gradient = torch.randn(999, device=device)
        theirs.grad = gradient.clone()
        optimizer.step()
        adamw_step(parameter, gradient, mean, square, step=step, **options)
    torch.testing.assert_close(parameter, theirs.detach(), rtol=2e-6, atol=2e-6)


def test_gradients_of_zero_only_decay(device: str) -> None:
    parameter = torch.ones(10, device=device)
    state = torch.zeros(2, 10, device=device)
    adamw_step(parameter, torch.zeros(10, device=device), *state, step=1, **OPTIONS)
    assert torch.equal(parameter, torch.full_like(parameter, 1 - 3e-3 * 0.1))


def test_nothing_beyond_the_shard_is_written(device: str) -> None:
    whole = torch.full((4, 100), 7.0, device=device)
    adamw_step(*(row[3:50] for row in whole), step=1, **OPTIONS)
    assert (whole[:, :3] == 7).all()
    assert (whole[:, 50:] == 7).all()


def test_compiled_and_eager_agree(device: str) -> None:
    shard = make_shard(100, device)
    again = [tensor.clone() for tensor in shard]
    factors = [getattr(step_factors(step=1, **OPTIONS), n) for n in fused.Factors.__slots__]
    torch.library.opcheck(
        fused.adamw,
        (*make_shard(9, device), factors),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.compile(lambda *t: adamw_step(*t, step=1, **OPTIONS), backend="aot_eager")(*shard)
    adamw_step(*again, step=1, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(shard, again, strict=True))


def change(**arguments: Any) -> dict[str, Any]:
    """Return arguments that are valid but for the given ones."""
    names = ("parameter", "gradient", "mean", "square")
    return {**{name: torch.zeros(8) for name in names}, "step": 1, "lr": 1e-3, **arguments}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (change(parameter=torch.zeros(8).half()), "parameter has dtype torch.float16; allowed are"),
        (change(mean=torch.zeros(8).half()), "mean has dtype torch.float16; allowed are float32"),
        (change(gradient=torch.zeros(7)), r"gradient has shape \(7,\); it must be \(8,\)"),
        (change(parameter=torch.zeros(2, 4)), r"parameter has shape \(2, 4\); it must be \(8,\)"),
        (change(square=torch.zeros(16)[::2]), "square is not contiguous; a shard is one run"),
        (change(copy=torch.zeros(8).int()), "copy has dtype torch.int32; allowed are float16"),
        (change(gradient=torch.zeros(8, device="meta")), "gradient is on meta; it must be on par"),
        (change(step=0), "step is 0; the first is 1"),
        (change(lr=-1.0), "lr is -1.0; it must be a finite number of at least 0"),
        (change(betas=(0.9, 1.0)), r"betas are \(0.9, 1.0\); each must be at least 0 and below 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adamw_step(**arguments)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="parameter is on cpu; it must be on a CUDA device"):
        adamw_step(**change())
