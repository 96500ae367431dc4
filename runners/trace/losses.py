"""The fused linear cross-entropy on tensors without memory: the kernel's own account, traced.

What allocates is `kernels.cross_entropy.triton.compute_gradients` itself; the operator around it
would hide its chunks from a trace.
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
        tokens, shifted = hidden.flatten(0, 1), losses.shifted_labels(labels)
        loss: Tensor = _FusedLinear.apply(tokens, weight, shifted)  # type: ignore[no-untyped-call]
        return loss


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # Imported here: Triton's import takes a while and the other losses have no use for it.
        from kernels.cross_entropy.triton import LossOptions, compute_gradients

        kind = "cpu"  # as are the traced tensors, or meta
        lower = torch.is_autocast_enabled(kind)
        options = LossOptions(
            mean=True,
            ignored_label=losses.IGNORED_LABEL,
            softcap=None,  # a cap changes values in the kernel, and no tensor
            compute_dtype=torch.get_autocast_dtype(kind) if lower else weight.dtype,
        )
        slices = losses.token_slices(len(hidden), len(weight))
        wanted = ctx.needs_input_grad[:2]
        loss, *ctx.gradients = compute_gradients(hidden, weight, labels, slices, options, *wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        made: list[Tensor] = ctx.gradients
        ctx.gradients = None
        # Scaled in place: each gives its bytes back and takes them again, as a gradient.
        hidden, weight = (
            partial(torch.empty, g.shape, dtype=g.dtype, device=g.device) if wanted else None
            for g, wanted in zip(made, ctx.needs_input_grad[:2], strict=True)
        )
        del made
        return None if hidden is None else hidden(), None if weight is None else weight(), None
