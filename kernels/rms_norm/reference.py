"""Plain RMS norm in torch: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension; differentiable.

    Below fp32 the norm is taken in fp32, rounded to `dtype` and then multiplied by the weight, as
    transformers' Llama does.
    """
    wide = torch.promote_types(dtype, torch.float32)
    values = x.to(dtype).to(wide)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return normed.to(dtype) * weight.to(dtype)
