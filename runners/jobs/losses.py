"""Losses that never hold all logits at once, for any supported Hugging Face causal LM."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.modeling_outputs import CausalLMOutput

from planner.memory.losses import chunk_tokens

IGNORED_LABEL = -100
LOSS_MODULE = "chunked_loss"
# Heads that do something else to their logits than cap them.
_UNKNOWN_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


def install_chunked_loss(model: nn.Module) -> None:
    """Make `model(input_ids, labels=...)` compute its loss chunk by chunk of the tokens.

    The model's modules stay as they are; only its `forward` after the last norm is ours. The output
    has a loss and no logits. Raises ValueError for a head that is more than a matrix and a cap.
    """
    install_loss(model, ChunkedLoss(_cap_of_head(model, "chunked")))


def install_fused_loss(model: nn.Module) -> None:
    """Make `model(input_ids, labels=...)` compute its loss with kernels/cross_entropy.

    As `install_chunked_loss` otherwise. Needs a GPU, or Triton's interpreter.
    """
    install_loss(model, FusedLoss(_cap_of_head(model, "fused linear")))


def _cap_of_head(model: nn.Module, loss: str) -> float | None:
    config: Any = model.config
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    scaled = [name for name in _UNKNOWN_SCALES if getattr(config, name, None) not in (None, 1.0)]
    if scaled or getattr(head, "bias", None) is not None:
        raise ValueError(f"the {loss} loss knows no head with {' and '.join(scaled or ['a bias'])}")
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


def install_loss(model: nn.Module, loss: nn.Module) -> None:
    """Make `model.forward` return `loss(hidden states, head weight, labels)`."""
    model.add_module(LOSS_MODULE, loss)
    model.forward = MethodType(_forward, model)


def _forward(model: Any, input_ids: Tensor, labels: Tensor, **options: Any) -> CausalLMOutput:
    hidden = model.base_model(input_ids=input_ids, **options)[0]
    weight = model.get_output_embeddings().weight
    return CausalLMOutput(loss=getattr(model, LOSS_MODULE)(hidden, weight, labels))


class ChunkedLoss(nn.Module):
    """Mean cross-entropy of the next token over hidden states [batch, sequence, hidden]."""

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self._cap = cap

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a head `weight` [vocabulary, hidden] under `labels` as HF shifts them.

        fp32, a mean over the labels that are not ignored.
        """
        shifted = shifted_labels(labels)
        tokens = hidden.flatten(0, 1)
        loss: Tensor = _ChunkedCrossEntropy.apply(tokens, weight, shifted, self._cap)  # type: ignore[no-untyped-call]
        return loss


class FusedLoss(nn.Module):
    """As `ChunkedLoss`, by the kernel that makes the gradients in the forward."""

    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self._cap = cap

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a head `weight` [vocabulary, hidden] under `labels` as HF shifts them.

        fp32, a mean over the labels that are not ignored.
        """
        # Imported here: Triton's import takes a while and the other losses have no use for it.
        from kernels.cross_entropy.triton import linear_cross_entropy

        tokens = hidden.flatten(0, 1)
        return linear_cross_entropy(
            tokens,
            weight,
            shifted_labels(labels),
            chunk_tokens=chunk_tokens(len(tokens), len(weight)),
            ignored_label=IGNORED_LABEL,
            softcap=self._cap,
        )


def shifted_labels(labels: Tensor) -> Tensor:
    """Each token's next label, [batch x sequence]; a row's last token has none."""
    return pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].reshape(-1)


def token_slices(num_tokens: int, vocab_size: int) -> list[slice]:
    """Cut the tokens into chunks of `chunk_tokens`."""
    size = chunk_tokens(num_tokens, vocab_size)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _autocast_device(tensor: Tensor) -> str:
    """The device type whose autocast concerns `tensor`; a traced meta tensor knows none."""
    return "cpu" if tensor.is_meta else tensor.device.type


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Keeps the hidden states and one fp32 per token; makes each chunk's logits again backward.

    Each chunk holds its logits in the compute dtype and once in fp32, where everything happens in
    place. The head's gradient is one buffer that the chunks add to.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None
    ) -> Tensor:
        kind = _autocast_device(hidden)
        lower = torch.is_autocast_enabled(kind)
        ctx.compute_dtype = torch.get_autocast_dtype(kind) if lower else weight.dtype
        ctx.cap = cap
        total = hidden.new_zeros((), dtype=torch.float32)
        normaliser = hidden.new_empty(len(labels), dtype=torch.float32)
        with torch.autocast(kind, enabled=False):
            matrix = weight.to(ctx.compute_dtype)
            for chunk in token_slices(len(labels), len(weight)):
                logits = _logits(hidden[chunk], matrix, cap).float()
                largest = logits.amax(-1, keepdim=True)
                own = _own(logits, labels[chunk]) - largest
                sums = logits.sub_(largest).exp_().sum(-1, keepdim=True).log_()
                del logits
                counted = labels[chunk] != IGNORED_LABEL
                total += ((sums - own).squeeze(-1) * counted).sum()
                normaliser[chunk] = (sums + largest).squeeze(-1)
        ctx.num_labels = (labels != IGNORED_LABEL).sum()
        ctx.save_for_backward(hidden, weight, labels, normaliser)
        loss: Tensor = total / ctx.num_labels
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, labels, normaliser = ctx.saved_tensors
        scale = gradients[0] / ctx.num_labels
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(_autocast_device(hidden), enabled=False):
            matrix = weight.to(ctx.compute_dtype)
            for chunk in token_slices(len(labels), len(weight)):
                grad_logits = _grad_logits(
                    _logits(hidden[chunk], matrix, ctx.cap),
                    labels[chunk],
                    normaliser[chunk],
                    scale,
                    ctx.cap,
                )
                grad_hidden[chunk] = grad_logits @ matrix
                if grad_weight is not None:
                    add_product(grad_weight, grad_logits, hidden[chunk])
                del grad_logits
        return grad_hidden, grad_weight, None, None


def _logits(hidden: Tensor, matrix: Tensor, cap: float | None) -> Tensor:
    logits = linear(hidden.to(matrix.dtype), matrix)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _own(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token's logit at its label, [tokens, 1]; an ignored label reads class 0."""
    return logits.gather(-1, labels.clamp(min=0).unsqueeze(-1))


def _grad_logits(
    logits: Tensor, labels: Tensor, normaliser: Tensor, scale: Tensor, cap: float | None
) -> Tensor:
    """(softmax - one-hot) x scale, before the cap, in the logits' dtype."""
    slope = None if cap is None else logits.div(cap).square_().neg_().add_(1.0)
    dtype = logits.dtype
    gradient = logits.float()
    del logits
    gradient.sub_(normaliser.unsqueeze(-1)).exp_()
    classes = labels.clamp(min=0).unsqueeze(-1)
    gradient.scatter_add_(-1, classes, torch.full_like(classes, -1.0, dtype=torch.float32))
    gradient.mul_(scale * (labels != IGNORED_LABEL).unsqueeze(-1))
    if slope is not None:
        gradient.mul_(slope)
    return gradient.to(dtype)


def add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add a chunk's gradient [tokens, vocabulary]^T @ [tokens, hidden] to the head's, in place."""
    if total.dtype is grad_logits.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total.add_(grad_logits.t() @ hidden.to(grad_logits.dtype))
