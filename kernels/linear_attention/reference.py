"""Plain causal linear attention in torch, quadratic: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import elu


def reference_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return sum_j<=i w_ij v_j / sum_j<=i w_ij with w_ij = f(q_i) . f(k_j), f = elu + 1.

    q (B, Hq, S, D), k and v (B, Hkv, S, D); Katharopoulos et al., arXiv 2006.16236. Each step is
    rounded to `dtype`; differentiable.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    weights = ((elu(q) + 1) @ (elu(k) + 1).transpose(-1, -2)).tril()
    return (weights @ v) / weights.sum(-1, keepdim=True)
