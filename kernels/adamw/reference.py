"""AdamW written out step by step in fp32: what the kernel must equal bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.adamw.triton import Factors


def reference_adamw(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, factors: Factors
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new (parameter, mean, square), each operation rounded to fp32 by itself.

    Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with torch's order: decay first, and the
    second bias correction under the root.
    """
    one = torch.ones((), dtype=torch.float32, device=parameter.device)

    def number(value: float) -> Tensor:
        return one * value

    grad = gradient.to(torch.float32)
    decayed = parameter * number(factors.decay)
    mean = mean * number(factors.beta1) + grad * number(factors.new1)
    square = square * number(factors.beta2) + (grad * grad) * number(factors.new2)
    # Not every build of torch rounds a root in fp32 correctly; one in float64, rounded, is correct.
    exact_root = torch.sqrt(square.double()).to(torch.float32)
    root = exact_root / number(factors.root_correction) + number(factors.eps)
    return decayed - (mean / root) * number(factors.step_size), mean, square
