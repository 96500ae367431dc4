"""Linear layer and cross-entropy in one: neither the logits nor their gradient is ever whole.

The forward goes through the tokens in chunks. torch's matrix product makes a chunk's logits in the
compute dtype, a Triton kernel turns them in place into their gradient, and two more products add to
the gradients of the hidden states and of the weight. The backward only scales these two, in place.

The weight's gradient is summed in the weight's own dtype, each chunk's product in fp32 by the matrix
unit: an fp32 sum would double its bytes, and the buffer becomes the parameter's gradient as it is.
What this costs in bf16 is one rounding per chunk; the tests hold it to twice the error of plain torch.

Held at the peak, beside the inputs: dX and dW (as large as hidden and weight), one chunk of logits,
4 bytes per token of losses, and in autocast regions the weight and a chunk's products once in the
lower dtype. `compute_gradients` is that account in code: the planner's ledger is traced from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.cross_entropy import device as kernels
from kernels.launch import check_dtype, check_like, check_runs_here, check_same_device, launch

REDUCTIONS = ("mean", "sum")
MAX_BLOCK = 4096
SCALE_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """How losses are made and summed; `compute_dtype` is that of the matrix products."""

    mean: bool
    ignored_label: int
    softcap: float | None
    compute_dtype: torch.dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    reduction: str = "mean",
    ignored_label: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Return the fp32 loss of logits = hidden @ weight^T under `labels`, without storing the logits.

    hidden (N, H) and weight (V, H) have one dtype of fp16, bf16, fp32 (in autocast regions any of
    them; products then run in its dtype); labels (N,) are int64 classes, shifted by the caller.
    A label equal to `ignored_label` counts nothing; any other that is no class gives NaN. `mean`
    divides by the labels that count (NaN if none does), `sum` does not. `softcap` c makes logits
    c * tanh(logits / c). `chunk_tokens` tokens have logits at once. The backward can run once only.
    Raises ValueError naming the argument at fault.
    """
    kind = _device_kind(hidden)
    lowers = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    compute_dtype = torch.get_autocast_dtype(kind) if lowers else weight.dtype
    _check_tensors(hidden, weight, labels, may_differ=lowers)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed are mean, sum")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap}; it must be a positive finite number or None")
    learns = torch.is_grad_enabled()
    loss: Tensor = linear_cross_entropy_forward(
        hidden,
        weight,
        labels,
        chunk_tokens,
        reduction == "mean",
        ignored_label,
        softcap,
        compute_dtype,
        learns and hidden.requires_grad,
        learns and weight.requires_grad,
    )[0]
    return loss


def _device_kind(tensor: Tensor) -> str:
    """The device type whose autocast concerns `tensor`; a meta tensor knows none."""
    return "cpu" if tensor.is_meta else tensor.device.type


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor, may_differ: bool) -> None:
    for name, tensor, shape in (("hidden", hidden, "(N, H)"), ("weight", weight, "(V, H)")):
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
        check_dtype(name, tensor)
    if weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight has {weight.shape[1]} columns; it must have hidden's {hidden.shape[1]}"
        )
    if weight.shape[0] == 0:
        raise ValueError("weight has 0 rows; there must be at least one class")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels has shape {tuple(labels.shape)}; it must be ({hidden.shape[0]},)")
    check_dtype("labels", labels, (torch.int64,))
    check_same_device("labels", labels, "hidden", hidden)
    if may_differ:
        check_same_device("weight", weight, "hidden", hidden)
    else:
        check_like("weight", weight, "hidden", hidden)


def token_slices(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """Cut the tokens into chunks of `chunk_tokens`; the last one has what is left."""
    starts = range(0, num_tokens, chunk_tokens)
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in starts]


def compute_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    slices: Sequence[slice],
    options: LossOptions,
    with_hidden: bool,
    with_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, dX, dW) for an incoming gradient of 1; a gradient not wanted has no elements.

    Every tensor of the loss is allocated here, chunk by chunk of `slices`, on any device: on meta
    tensors only the allocations happen.
    """
    with torch.autocast(_device_kind(hidden), enabled=False):
        num_labels = (labels != options.ignored_label).sum()
        grad_hidden = hidden.new_empty(hidden.shape if with_hidden else 0)
        grad_weight = weight.new_zeros(weight.shape if with_weight else 0)
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        matrix = weight.to(options.compute_dtype)
        for chunk in slices:
            part = hidden[chunk].to(options.compute_dtype)
            logits = part @ matrix.t()
            cross_entropy_rows(
                logits,
                labels[chunk],
                losses[chunk],
                num_labels,
                options.mean,
                options.ignored_label,
                options.softcap,
                with_hidden or with_weight,
            )
            if with_hidden:
                _multiply_into(grad_hidden[chunk], logits, matrix)
            if with_weight:
                _add_product(grad_weight, logits, part)
            del part, logits
        loss = losses.sum()
        if options.mean:
            loss.div_(num_labels)
    return loss, grad_hidden, grad_weight


def _multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right; through a product of its own where the dtypes differ."""
    if out.dtype is left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add a chunk's gradient [tokens, V]^T @ [tokens, H] to the weight's, in place."""
    if total.dtype is grad_logits.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total.add_(grad_logits.t() @ hidden)


@torch.library.custom_op("peakmark::cross_entropy_rows", mutates_args=("logits", "losses"))
def cross_entropy_rows(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    num_labels: Tensor,
    mean: bool,
    ignored_label: int,
    softcap: float | None,
    with_gradient: bool,
) -> None:
    """Write each row's loss, and over logits (N, V), rows contiguous, their gradient if wanted."""
    check_runs_here("hidden", logits)
    rows, num_classes = logits.shape
    launch(
        kernels.cross_entropy_kernel,
        (rows,),
        logits,
        (
            *(logits, labels.contiguous(), losses, num_labels, logits.stride(0)),
            *(num_classes, ignored_label, 1.0 if softcap is None else softcap),
        ),
        CAPPED=softcap is not None,
        MEAN=mean,
        WITH_GRADIENT=with_gradient,
        **row_options(num_classes),
    )


@cross_entropy_rows.register_fake
def _(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    num_labels: Tensor,
    mean: bool,
    ignored_label: int,
    softcap: float | None,
    with_gradient: bool,
) -> None:
    return None


def row_options(num_classes: int) -> dict[str, int]:
    """Return the launch options of a row of `num_classes` logits: its tile and its warps."""
    block = min(MAX_BLOCK, max(16, triton.next_power_of_2(num_classes)))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@torch.library.custom_op("peakmark::scale_in_place", mutates_args=("values",))
def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a scalar tensor; the host does not wait for its value."""
    count = values.numel()
    programs = triton.cdiv(count, SCALE_BLOCK)
    arguments = (values, factor, count)
    launch(kernels.scale_kernel, (programs,), values, arguments, BLOCK=SCALE_BLOCK)


@scale_in_place.register_fake
def _(values: Tensor, factor: Tensor) -> None:
    return None


@torch.library.custom_op("peakmark::linear_cross_entropy_forward", mutates_args=())
def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    mean: bool,
    ignored_label: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    with_hidden: bool,
    with_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, dX, dW); the arguments are checked by `linear_cross_entropy`."""
    check_runs_here("hidden", hidden)
    options = LossOptions(
        mean=mean, ignored_label=ignored_label, softcap=softcap, compute_dtype=compute_dtype
    )
    slices = token_slices(len(hidden), chunk_tokens)
    return compute_gradients(hidden, weight, labels, slices, options, with_hidden, with_weight)


@linear_cross_entropy_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    mean: bool,
    ignored_label: int,
    softcap: float | None,
    compute_dtype: torch.dtype,
    with_hidden: bool,
    with_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if with_hidden else 0),
        weight.new_empty(weight.shape if with_weight else 0),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-2:]
    ctx.is_spent = False


def _backward(ctx: Any, dloss: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    if ctx.is_spent:
        raise RuntimeError(
            "linear_cross_entropy keeps its gradients, not its logits: call backward once for each "
            "forward"
        )
    ctx.is_spent = True
    gradients: list[Tensor | None] = [None, None]
    if dloss is not None:
        for index, (made, wanted) in enumerate(zip(ctx.saved_tensors, ctx.wanted, strict=True)):
            if wanted:
                scale_in_place(made, dloss)
                gradients[index] = made
    return *gradients, *[None] * 8


linear_cross_entropy_forward.register_autograd(_backward, setup_context=_save_for_backward)
