"""The fused linear cross-entropy as its kernel will hold memory; it computes nothing.

Of each chunk of tokens it makes the logits in the compute dtype, turns them into their gradient in
place, and adds to the gradients of hidden states and head, all in the forward. The backward only
scales these two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runners.jobs import losses
from runners.trace.symbols import PRIMES

_TRACED_CHUNKS = 3


def install_fused_loss(model: nn.Module) -> None:
    """Make `model` compute its loss in this way."""
    losses.install_loss(model, _FusedLoss())


def traced_slices(num_tokens: int, vocab_size: int) -> list[slice]:
    """Three chunks of a recognisable size: what a chunk leaves behind shows in its successor."""
    size = PRIMES["chunk"]
    return [slice(size * index, size * (index + 1)) for index in range(_TRACED_CHUNKS)]


class _FusedLoss(nn.Module):
    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return a loss without a value for a head `weight` [vocabulary, hidden]."""
        loss: Tensor = _FusedLinear.apply(hidden.flatten(0, 1), weight)  # type: ignore[no-untyped-call]
        return loss


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        kind = "cpu"  # as are the traced tensors, or meta
        lower = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if lower else weight.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        token_losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(dtype)
            for chunk in losses.token_slices(len(hidden), len(weight)):
                part = hidden[chunk].to(dtype)
                logits = part @ matrix.t()
                grad_hidden[chunk] = logits @ matrix
                if grad_weight is not None:
                    losses.add_product(grad_weight, logits, part)
                del part, logits
        ctx.gradients = grad_hidden, grad_weight
        return token_losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        made: tuple[Tensor, Tensor | None] = ctx.gradients
        ctx.gradients = None
        # Scaled in place: each gives its bytes back and takes them again, as a gradient.
        hidden, weight = (
            None if g is None else partial(torch.empty, g.shape, dtype=g.dtype, device=g.device)
            for g in made
        )
        del made
        assert hidden is not None
        return hidden(), None if weight is None else weight()
