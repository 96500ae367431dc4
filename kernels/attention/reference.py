"""Plain attention in torch: the measuring stick for the Triton kernels.

Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, V) with Hq a multiple of Hkv. Query i
sees key j when j <= i + Sk - Sq (causal, aligned to the bottom right) or where a boolean matrix says
so. A query that sees nothing gives output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    visible: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) computed in `dtype` with all scores stored; differentiable by autograd.

    out (B, Hq, Sq, V) = softmax(scale * q k^T) v and lse (B, Hq, Sq) = logsumexp(scale * q k^T), in
    `dtype`, scale defaulting to D**-0.5. `visible` broadcasts to (B, Hq, Sq, Sk) and replaces
    `causal`. `softcap` c makes a logit x c * tanh(x / c); `sinks` (Hq,) are one more logit a row
    whose value is 0. Below fp32 the logits, weights and products are rounded to `dtype` as a plain
    model does, with the softmax itself in fp32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    logits = (q @ k.transpose(-1, -2)) * scale
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal and visible is None:
        visible = causal_mask(q.shape[2], k.shape[2], q.device)
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # exp(-inf - -inf) is NaN: a row without keys is compared with 0 instead.
    anchor = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.exp(logits - anchor[..., None]).to(dtype)
    return weights @ v, lse


def causal_mask(seq_q: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the (seq_q, seq_k) boolean mask of visible keys, aligned to the bottom right."""
    ones = torch.ones(seq_q, seq_k, dtype=torch.bool, device=device)
    return ones.tril(diagonal=seq_k - seq_q)
