"""Plain linear + cross-entropy in torch, with all logits stored: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignored_label: int = -100,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return the loss of logits = hidden @ weight^T under `labels`; differentiable by autograd.

    hidden (N, H), weight (V, H), labels (N,). Below fp32 the logits are rounded to `dtype` and
    taken to fp32 for the softmax, as transformers does.
    """
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    return cross_entropy(logits, labels, reduction=reduction, ignore_index=ignored_label)
