"""The variants of attention that the job `attention` runs, one after the other.

Shape letters: B batch, H query heads, K key/value heads, S sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.dispatch import Backend, Direction, last_choice
from kernels.attention.masks import Mask, block_sparse, global_local, prefix, window
from kernels.attention.triton import flash_attention
from kernels.launch import INTERPRETED
from kernels.linear_attention.triton import causal_linear_attention
from planner.attention.problem import AttentionProblem, Variant, obstacle
from runners.jobs.attention_calls import sdpa_backend

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MAX_INTERPRETED_TOKENS = 512
TORCH_VARIANTS = (Variant.EAGER, Variant.SDPA)


def eager_attention(problem: AttentionProblem) -> Attend:
    """Return attention with stored scores, as transformers' eager implementation computes it.

    The causal mask is made at the first call and kept: a model makes one for all its layers.
    """
    mask: Tensor | None = None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal mask
        group = problem.heads // problem.kv_heads
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * problem.scale
        if problem.causal:
            mask = causal_mask(problem.sequence_length, query) if mask is None else mask
            scores = scores + mask
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value)

    return attend


def sdpa_attention(problem: AttentionProblem) -> Attend:
    """Return torch's scaled_dot_product_attention, which chooses its own backend."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=problem.causal,
            scale=problem.scale,
            enable_gqa=problem.heads != problem.kv_heads,
        )

    return attend


def triton_attention(problem: AttentionProblem) -> Attend:
    """Return our kernel."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_attention(query, key, value, causal=problem.causal, scale=problem.scale)

    return attend


def _masked(make: Callable[[AttentionProblem, torch.device], Mask]) -> Callable[..., Attend]:
    """Return our kernel under a mask, which is made at the first call and kept."""

    def attention(problem: AttentionProblem) -> Attend:
        mask: Mask | None = None

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            nonlocal mask
            mask = make(problem, query.device) if mask is None else mask
            return flash_attention(query, key, value, mask=mask, scale=problem.scale)

        return attend

    return attention


def _window_mask(problem: AttentionProblem, _: torch.device) -> Mask:
    reach = problem.window - 1
    return window(reach, 0 if problem.causal else reach)


def _global_mask(problem: AttentionProblem, _: torch.device) -> Mask:
    reach = problem.window - 1
    if problem.causal:
        return global_local(problem.global_tokens, reach)
    return prefix(problem.global_tokens, reach, reach)


def _block_mask(problem: AttentionProblem, device: torch.device) -> Mask:
    length = problem.sequence_length
    table = strided_blocks(problem).to(device)
    return block_sparse(table, problem.block, (length, length), causal=problem.causal)


def strided_blocks(problem: AttentionProblem) -> Tensor:
    """Return the table of blocks (boolean) at a multiple of the stride from a query's own."""
    number = torch.arange(-(-problem.sequence_length // problem.block))
    return (number[:, None] - number[None, :]) % problem.block_stride == 0


def linear_attention(problem: AttentionProblem) -> Attend:
    """Return our causal linear attention, another function than softmax attention."""
    return causal_linear_attention


KERNELS: dict[str, Callable[[AttentionProblem], Attend]] = {
    Variant.EAGER: eager_attention,
    Variant.SDPA: sdpa_attention,
    Variant.TRITON: triton_attention,
    Variant.WINDOW: _masked(_window_mask),
    Variant.GLOBAL_LOCAL: _masked(_global_mask),
    Variant.BLOCK_SPARSE: _masked(_block_mask),
    Variant.LINEAR: linear_attention,
}


def backends_that_ran(
    variant: Variant, problem: AttentionProblem, inputs: tuple[Tensor, Tensor, Tensor]
) -> dict[str, str]:
    """Return by direction what computed the latest call of a variant."""
    if variant is Variant.EAGER:
        return {direction.value: "torch" for direction in Direction}
    if variant is Variant.SDPA:
        chosen = sdpa_backend(
            *inputs,
            is_causal=problem.causal,
            scale=problem.scale,
            enable_gqa=problem.heads != problem.kv_heads,
        )
        return {direction.value: chosen for direction in Direction}
    if variant is Variant.LINEAR:
        return {direction.value: Backend.TRITON.value for direction in Direction}
    choices = {direction.value: last_choice(direction) for direction in Direction}
    return {
        direction: (choice.backend if choice else Backend.TRITON).value
        for direction, choice in choices.items()
    }


def reason_to_skip(
    variant: str, problem: AttentionProblem, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a variant cannot run here, or None."""
    cannot = obstacle(problem, Variant(variant))
    if cannot is not None:
        return cannot
    if variant in TORCH_VARIANTS or device.type == "cuda":
        return None
    if not INTERPRETED:
        return "Triton kernels need a GPU, or TRITON_INTERPRET=1 for small shapes"
    tokens = problem.batch * problem.heads * problem.sequence_length
    if tokens > MAX_INTERPRETED_TOKENS:
        return f"the interpreter is for B*H*S up to {MAX_INTERPRETED_TOKENS}, this is {tokens}"
    if dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None


def causal_mask(length: int, like: Tensor) -> Tensor:
    """Return the additive mask [S, S]: 0 where key <= query, the dtype's minimum elsewhere."""
    lowest = torch.finfo(like.dtype).min
    return torch.full((length, length), lowest, dtype=like.dtype, device=like.device).triu_(1)
