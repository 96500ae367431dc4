"""AdamW on a real GPU: bf16 gradients and copy, no bytes of its own, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from kernels.adamw.reference import reference_adamw
from kernels.adamw.triton import adamw_step, step_factors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def test_a_large_shard_equals_the_written_out_steps_to_the_bit_and_allocates_nothing() -> None:
    count = 10_000_019
    parameter, gradient = torch.randn(2, count, device="cuda")
    gradient = gradient.bfloat16()
    mean, square = torch.zeros(2, count, device="cuda")
    copy = torch.empty(count, device="cuda", dtype=BF16)
    for step in (1, 2, 3):
        factors = step_factors(step=step, **OPTIONS)
        expected = reference_adamw(parameter, gradient, mean, square, factors)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        adamw_step(parameter, gradient, mean, square, step=step, copy=copy, **OPTIONS)
        assert torch.cuda.max_memory_allocated() == before
        assert torch.equal(parameter, expected[0])
        assert torch.equal(mean, expected[1])
        assert torch.equal(square, expected[2])
        assert torch.equal(copy, expected[0].bfloat16())


def test_more_than_two_to_the_31_elements() -> None:
    count = 2**31 + 5000
    tensors = [torch.randn(count, device="cuda") for _ in range(3)]
    tensors.append(torch.rand(count, device="cuda"))
    last = [tensor[-100:].clone() for tensor in tensors]
    adamw_step(*tensors, step=2, **OPTIONS)
    adamw_step(*last, step=2, **OPTIONS)
    assert all(torch.equal(a[-100:], b) for a, b in zip(tensors, last, strict=True))
