"""The attention implementations that the job `attention` compares, and their float64 reference.

Shape letters: B batch, H query heads, K key/value heads, S sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.dispatch import Backend, Direction, last_choice
from kernels.attention.reference import reference_attention
from kernels.attention.triton import flash_attention
from kernels.launch import INTERPRETED

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MAX_INTERPRETED_TOKENS = 512
# The float64 reference never holds more than this many scores of one batch item at once.
MAX_REFERENCE_SCORES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention problem: Q [B, H, S, D], K and V [B, K, S, D]."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    sequence_length: int
    causal: bool

    @property
    def scale(self) -> float:
        """The factor on the scores, D^-1/2."""
        return float(self.head_dim**-0.5)

    def forward_flops(self) -> float:
        """Return the FLOPs of Q K^T and P V, 4 B H S^2 D, halved when causal."""
        scores = self.batch * self.heads * self.sequence_length**2
        return 4.0 * scores * self.head_dim / (2 if self.causal else 1)


def eager_attention(shape: AttentionShape) -> Attend:
    """Return attention with stored scores, as transformers' eager implementation computes it.

    The causal mask is made at the first call and kept: a model makes one for all its layers.
    """
    mask: Tensor | None = None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal mask
        group = shape.heads // shape.kv_heads
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * shape.scale
        if shape.causal:
            mask = causal_mask(shape.sequence_length, query) if mask is None else mask
            scores = scores + mask
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value)

    return attend


def sdpa_attention(shape: AttentionShape) -> Attend:
    """Return torch's scaled_dot_product_attention, which chooses its own backend."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=shape.causal,
            scale=shape.scale,
            enable_gqa=shape.heads != shape.kv_heads,
        )

    return attend


def triton_attention(shape: AttentionShape) -> Attend:
    """Return our Triton kernel."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_attention(query, key, value, causal=shape.causal, scale=shape.scale)

    return attend


KERNELS: dict[str, Callable[[AttentionShape], Attend]] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "triton": triton_attention,
}


def backends_that_ran(kernel: str) -> dict[str, str] | None:
    """Return by direction which of our kernels computed the latest call; None for torch's own."""
    if kernel != "triton":
        return None
    choices = {direction.value: last_choice(direction) for direction in Direction}
    return {
        direction: (choice.backend if choice else Backend.TRITON).value
        for direction, choice in choices.items()
    }


def reason_to_skip(
    kernel: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a kernel cannot run here, or None."""
    if kernel != "triton" or device.type == "cuda":
        return None
    if not INTERPRETED:
        return "Triton kernels need a GPU, or TRITON_INTERPRET=1 for small shapes"
    tokens = shape.batch * shape.heads * shape.sequence_length
    if tokens > MAX_INTERPRETED_TOKENS:
        return f"the interpreter is for B*H*S up to {MAX_INTERPRETED_TOKENS}, this is {tokens}"
    if dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None


def causal_mask(length: int, like: Tensor) -> Tensor:
    """Return the additive mask [S, S]: 0 where key <= query, the dtype's minimum elsewhere."""
    lowest = torch.finfo(like.dtype).min
    return torch.full((length, length), lowest, dtype=like.dtype, device=like.device).triu_(1)


def reference_blocks(shape: AttentionShape) -> list[slice]:
    """Return the query rows to compare: all of them, or a block each at start, middle and end.

    Together they need at most MAX_REFERENCE_SCORES scores of one batch item.
    """
    length = shape.sequence_length
    rows = MAX_REFERENCE_SCORES // (shape.heads * length)
    if rows >= length:
        return [slice(0, length)]
    block = max(1, rows // 3)
    starts = (0, (length - block) // 2, length - block)
    return [slice(start, start + block) for start in starts]


def reference_output(shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the float64 output [1, H, R, D] of batch item 0 at the rows of `reference_blocks`."""
    parts = []
    for rows in reference_blocks(shape):
        # Causal masks are aligned to the last key: with the later keys cut off, to the last row.
        keys = slice(0, rows.stop if shape.causal else shape.sequence_length)
        parts.append(
            reference_attention(
                query[:1, :, rows],
                key[:1, :, keys],
                value[:1, :, keys],
                causal=shape.causal,
                scale=shape.scale,
            )[0]
        )
    return torch.cat(parts, dim=2)


def reference_gradients(
    shape: AttentionShape, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor
) -> tuple[Tensor, ...] | None:
    """Return float64 gradients of Q, K and V for batch item 0; None where they are too large."""
    if len(reference_blocks(shape)) > 1:
        return None
    inputs = [x[:1].detach().double().requires_grad_() for x in (query, key, value)]
    output, _ = reference_attention(*inputs, causal=shape.causal, scale=shape.scale)
    return torch.autograd.grad(output, inputs, upstream[:1].double())
