"""Time linear attention by length: `python -m kernels.linear_attention.bench` on a CUDA GPU.

The peer is torch's causal softmax attention over the same tensors: another function, which grows with
the square of the length where this one grows with the length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.linear_attention.reference import reference_linear_attention
from kernels.linear_attention.triton import causal_linear_attention
from kernels.timing import Report, relative_error, report_of, require, times_in_turns

BATCH = 4
# Heads and their size.
SHAPES = ((16, 64), (16, 128))
LENGTHS = (2048, 8192, 32768)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own, with the backend it chooses."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def call_of(attention: Attention, direction: str, tensors: list[Tensor]) -> Callable[[], object]:
    """Return a call of one direction alone."""
    *leaves, grad = tensors
    if direction == "forward":
        return lambda: attention(*(leaf.detach() for leaf in leaves))
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def compare(report: Report, heads: int, head_dim: int, seq: int) -> None:
    """Check one shape against float64, then time both directions."""
    case = {"batch": BATCH, "heads": heads, "head_dim": head_dim, "seq": seq}
    shape = (BATCH, seq, heads, head_dim)
    rows = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (row.transpose(1, 2) for row in rows)
    tensors = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]
    with report.surviving(case):
        few = [tensor[:1, :1, :1024] for tensor in tensors[:3]]
        error = relative_error(causal_linear_attention(*few), reference_linear_attention(*few))
        require("out", error, 1e-2)
        for direction in ("forward", "backward"):
            attentions = {"ours": causal_linear_attention, "softmax": softmax_attention}
            calls = {n: call_of(a, direction, tensors) for n, a in attentions.items()}
            times = times_in_turns(calls)
            report.add(
                {**case, "direction": direction},
                ours_s=times["ours"],
                softmax_s=times["softmax"],
                ratio_to_softmax=times["softmax"] / times["ours"],
            )


def main() -> None:
    """Print one line per shape and direction; `--json FILE` appends rows."""
    report = report_of("linear_attention")
    for heads, head_dim in SHAPES:
        for seq in LENGTHS:
            compare(report, heads, head_dim, seq)


if __name__ == "__main__":
    main()
