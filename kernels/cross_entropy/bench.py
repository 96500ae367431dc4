"""Time the fused loss beside the chain of transformers: `python -m kernels.cross_entropy.bench`.

Peers: the head's matrix product, logits in fp32 and torch's cross-entropy, as transformers runs
them, eagerly and under torch.compile. One call is forward and backward. FLOPs: 6 N V H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kernels.cross_entropy.triton import linear_cross_entropy
from kernels.timing import Report, peak_bytes, relative_error, report_of, require, times_in_turns

# Tokens, hidden size, vocabulary; a chunk as the planner cuts it: at most 2^26 logits.
CASES = [
    *[(4096, 2048, 128256), (4096, 4096, 128256), (8192, 4096, 128256), (16384, 2048, 128256)],
    (8192, 2304, 256000),
]
CHUNK_LOGITS = 1 << 26
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def transformers_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The loss as a transformers model computes it: all logits, then in fp32."""
    logits = torch.nn.functional.linear(hidden, weight)
    return cross_entropy(logits.float(), labels)


def fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Ours, in chunks of a multiple of 64 tokens."""
    chunk_tokens = max(CHUNK_LOGITS // len(weight) // 64, 1) * 64
    return linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)


def step(loss: Loss, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Return a call of forward and backward."""
    return lambda: torch.autograd.grad(loss(*inputs), inputs[:2])


def check(inputs: tuple[Tensor, ...]) -> None:
    """Hold our gradients of the first 512 tokens to twice the error of transformers' in bf16."""
    hidden, weight, labels = (t[:512] if t is not inputs[1] else t for t in inputs)
    hidden = hidden.detach().requires_grad_()
    exact_inputs = tuple(t.detach().float().requires_grad_() for t in (hidden, weight))
    exact = step(transformers_loss, (*exact_inputs, labels))()
    plain = step(transformers_loss, (hidden, weight, labels))()
    ours = step(fused_loss, (hidden, weight, labels))()
    for name, mine, theirs, x in zip(("dX", "dW"), ours, plain, exact, strict=True):
        require(name, relative_error(mine, x), 2 * relative_error(theirs, x))


def compare(report: Report, tokens: int, width: int, classes: int) -> None:
    """Time and weigh one case, ours beside both peers."""
    case: dict[str, Any] = {"tokens": tokens, "hidden_size": width, "vocab_size": classes}
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    inputs = (hidden, weight.requires_grad_(), torch.randint(classes, (tokens,), device="cuda"))
    with report.surviving(case):
        check(inputs)
        losses = {
            "ours": fused_loss,
            "transformers": transformers_loss,
            "compiled": torch.compile(transformers_loss, dynamic=False),
        }
        calls = {name: step(loss, inputs) for name, loss in losses.items()}
        peaks = {name: peak_bytes(call) for name, call in calls.items()}
        times = times_in_turns(calls)
        made = hidden.nbytes + weight.nbytes
        report.add(
            case,
            **{f"{name}_s": time for name, time in times.items()},
            **{f"{name}_peak_bytes": peak for name, peak in peaks.items()},
            ours_flop_s=6.0 * tokens * width * classes / times["ours"],
            ratio_to_transformers=times["transformers"] / times["ours"],
            ratio_to_compiled=times["compiled"] / times["ours"],
            peak_share_of_transformers=peaks["ours"] / peaks["transformers"],
            peak_share_of_compiled=peaks["ours"] / peaks["compiled"],
            # Every peer makes dX and dW; beside them there is what the loss itself costs.
            share_beside_gradients=(peaks["ours"] - made) / (peaks["transformers"] - made),
        )


def main() -> None:
    """Print one line per case; `--json FILE` appends rows."""
    report = report_of("cross_entropy")
    for case in CASES:
        compare(report, *case)


if __name__ == "__main__":
    main()
