"""Plain SwiGLU in torch: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def reference_swiglu(gate: Tensor, up: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return silu(gate) * up, each step rounded to `dtype`; differentiable."""
    return silu(gate.to(dtype)) * up.to(dtype)
