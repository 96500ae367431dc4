"""Plain rotary position embedding in torch, as transformers writes it: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return x cos + rotate_half(x) sin; x (B, H, S, D), cos and sin (B or 1, S, R), R <= D.

    The first R dimensions turn, the others stay. Each step is rounded to `dtype`; differentiable.
    """
    x, cos, sin = (tensor.to(dtype) for tensor in (x, cos[:, None], sin[:, None]))
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos + rotated * sin, kept), dim=-1)
