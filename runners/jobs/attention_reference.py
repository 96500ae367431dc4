"""Float64 results of an attention problem: what every variant should give, for sampled query rows.

Shape letters: B batch, H query heads, K key/value heads, S sequence, D head size, R compared rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import elu

from kernels.attention.reference import reference_attention
from planner.attention.problem import AttentionProblem, Variant

# Never more than this many scores of one batch item at once, in this many blocks of rows.
MAX_REFERENCE_SCORES = 2**27
SAMPLED_BLOCKS = 16


def reference_blocks(problem: AttentionProblem) -> list[slice]:
    """Return the query rows to compare: all of them, or evenly spread blocks, first and last included.

    Together they need at most MAX_REFERENCE_SCORES scores of one batch item.
    """
    length = problem.sequence_length
    rows = MAX_REFERENCE_SCORES // (problem.heads * length)
    if rows >= length:
        return [slice(0, length)]
    number = max(1, min(SAMPLED_BLOCKS, rows))
    block, gaps = max(1, rows // number), max(1, number - 1)
    starts = [index * (length - block) // gaps for index in range(number)]
    return [slice(start, start + block) for start in starts]


def visible_keys(
    problem: AttentionProblem, variant: Variant, rows: slice, device: torch.device
) -> Tensor:
    """Return which of the S keys the query rows see, boolean [R, S]."""
    length = problem.sequence_length
    query = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    near = (query - key).abs() < problem.window
    if variant is Variant.WINDOW:
        seen = near
    elif variant is Variant.GLOBAL_LOCAL:
        seen = near | (key < problem.global_tokens)
    elif variant is Variant.BLOCK_SPARSE:
        apart = query // problem.block - key // problem.block
        seen = apart % problem.block_stride == 0
    else:
        seen = torch.ones(query.shape[0], length, dtype=torch.bool, device=device)
    return seen & (key <= query) if problem.causal else seen


def attend_exactly(
    problem: AttentionProblem, variant: Variant, rows: slice, query: Tensor, keys: Sequence[Tensor]
) -> Tensor:
    """Return the float64 output [1, H, R, D] of a variant for query rows [1, H, R, D]."""
    key, value = keys
    visible = visible_keys(problem, variant, rows, query.device)
    if variant is not Variant.LINEAR:
        return reference_attention(query, key, value, visible=visible, scale=problem.scale)[0]
    group = problem.heads // problem.kv_heads
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    weights = ((elu(query.double()) + 1) @ (elu(key) + 1).mT) * visible
    return (weights @ value) / weights.sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Reference:
    """Float64 results for batch item 0 at the rows of `reference_blocks`.

    `gradients` has dq of these rows, and dk and dv too where they are all rows.
    """

    rows: list[slice]
    output: Tensor
    gradients: dict[str, Tensor]

    def compared(self, tensor: Tensor) -> Tensor:
        """Return the compared rows of a tensor [B, H, S, D]."""
        return torch.cat([tensor[:1, :, rows] for rows in self.rows], dim=2)


def reference_of(
    problem: AttentionProblem,
    variant: Variant,
    inputs: tuple[Tensor, Tensor, Tensor],
    upstream: Tensor,
) -> Reference:
    """Compute a variant's results in float64."""
    blocks = reference_blocks(problem)
    query, key, value = (x[:1].detach().double() for x in inputs)
    is_whole = len(blocks) == 1
    outputs, dqueries, others = [], [], {}
    for rows in blocks:
        leaf = query[:, :, rows].clone().requires_grad_()
        keys = [x.clone().requires_grad_(is_whole) for x in (key, value)]
        output = attend_exactly(problem, variant, rows, leaf, keys)
        wanted = [leaf, *keys] if is_whole else [leaf]
        found = torch.autograd.grad(output, wanted, upstream[:1, :, rows].double())
        outputs.append(output.detach())
        dqueries.append(found[0])
        others = dict(zip(("dk", "dv"), found[1:], strict=False))
    gradients = {"dq": torch.cat(dqueries, dim=2), **others}
    return Reference(blocks, torch.cat(outputs, dim=2), gradients)
