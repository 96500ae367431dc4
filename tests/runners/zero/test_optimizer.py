"""The shard optimizer against AdamW and SGD written out by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch

from runners.zero.optimizer import ShardOptimizer, build_optimizer

GRADIENTS = ([0.5, -0.25], [0.125, 1.0])


def _adamw_by_hand(value: float, gradients: list[float], lr: float) -> float:
    first = second = 0.0
    for step, gradient in enumerate(gradients, start=1):
        value *= 1 - lr * 0.01
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        corrected = math.sqrt(second / (1 - 0.999**step)) + 1e-8
        value -= lr * first / (1 - 0.9**step) / corrected
    return value


@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_foreach", "adamw_loop"])
def test_adamw_variants_take_the_same_steps(kind: str) -> None:
    shard = torch.tensor([1.0, -2.0])
    optimizer = ShardOptimizer(shard, kind=kind, lr=0.1, with_master=False)
    for gradient in GRADIENTS:
        optimizer.step(torch.tensor(gradient))
    by_element = [list(values) for values in zip(*GRADIENTS, strict=True)]
    expected = [_adamw_by_hand(1.0, by_element[0], 0.1), _adamw_by_hand(-2.0, by_element[1], 0.1)]
    assert shard.tolist() == pytest.approx(expected, rel=1e-6)


def test_sgd_has_momentum_0_9() -> None:
    shard = torch.tensor([1.0, -2.0])
    optimizer = ShardOptimizer(shard, kind="sgd", lr=0.1, with_master=False)
    for gradient in GRADIENTS:
        optimizer.step(torch.tensor(gradient))
    # First step: lr * g1; second: lr * (0.9 g1 + g2).
    expected = [1.0 - 0.05 - 0.1 * (0.45 + 0.125), -2.0 + 0.025 - 0.1 * (-0.225 + 1.0)]
    assert shard.tolist() == pytest.approx(expected, rel=1e-6)
    assert optimizer.state_bytes() == 2 * 4


def test_a_master_copy_keeps_what_bf16_cannot() -> None:
    shard = torch.ones(4, dtype=torch.bfloat16)
    optimizer = ShardOptimizer(shard, kind="sgd", lr=1e-4, with_master=True)
    for _ in range(3):
        optimizer.step(torch.ones(4, dtype=torch.bfloat16))
    # 1e-4 * (1 + 1.9 + 2.71) is below half a bf16 step under 1 (2^-9): only the master moves.
    assert shard.tolist() == [1.0] * 4
    for _ in range(7):
        optimizer.step(torch.ones(4, dtype=torch.bfloat16))
    assert shard.tolist() == [0.99609375] * 4
    assert optimizer.state_bytes() == 4 * (4 + 4)


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="optimizer 'lion' is not one of adamw_fused"):
        build_optimizer("lion", [torch.zeros(1)], 0.1)
