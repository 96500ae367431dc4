"""Time our attention's masks beside FlexAttention: `python -m kernels.attention.bench_masks`.

bf16, random normal, B * S = 32,768 tokens and H * D = 2048. FlexAttention is compiled for the same
mask (fullgraph, static shapes, no recompilation past its limit, so no eager fall-back). Every result
is compared before it is timed; times are medians, taken in turns (kernels/timing.py). Ours is the
backend asked for, the portable one if none is; the causal attention beside a window is what runs
by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.attention import masks
from kernels.attention.dispatch import Backend, Direction, forced_backend
from kernels.attention.masks import Mask, MaskKind
from kernels.attention.triton import flash_attention
from kernels.timing import Report, times_in_turns

TOKENS = 32768
HIDDEN = 2048
WINDOW = 4096
DOCUMENT = 4096
BLOCK = 128
# Two kernels in bf16 with other orders of summation; a wrong mask is off by a tenth or more.
MAX_DIFFERENCE = 1e-2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rule = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mask at one shape: ours, and FlexAttention's rule for the same."""

    name: str
    head_dim: int
    seq: int
    mask: Mask
    rule: Rule
    softcap: float | None = None


def _block_case(head_dim: int, seq: int) -> Case:
    """Return a block table of which about a quarter is set, with the diagonal."""
    count = seq // BLOCK
    drawn = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < 0.25
    table = (drawn | torch.eye(count, dtype=torch.bool)).cuda()

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        return table[i // BLOCK, j // BLOCK]

    mask = masks.block_sparse(table, BLOCK, (seq, seq))
    return Case(name="block-sparse, 25 %", head_dim=head_dim, seq=seq, mask=mask, rule=rule)


def _document_case(head_dim: int, seq: int) -> Case:
    ends = torch.arange(0, seq + 1, DOCUMENT).cuda()

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i // DOCUMENT == j // DOCUMENT) & (j <= i)

    mask = masks.documents(ends, seq)
    return Case(name="documents of 4k", head_dim=head_dim, seq=seq, mask=mask, rule=rule)


def cases() -> Iterator[Case]:
    """Yield the bar first, a window; then the other kinds (`bench_flex` has full and causal)."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (j > i - WINDOW)

    def globals_too(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & ((j > i - WINDOW) | (j < BLOCK))

    sliding, local = masks.window(WINDOW - 1), masks.global_local(BLOCK, WINDOW - 1)
    for dim in (128, 64):
        yield Case(name="window 4k", head_dim=dim, seq=TOKENS, mask=sliding, rule=window)
    yield _document_case(128, TOKENS)
    yield _block_case(128, 8192)
    yield Case(name="global 128, window 4k", head_dim=128, seq=TOKENS, mask=local, rule=globals_too)
    plain = Case(name="causal", head_dim=128, seq=8192, mask=masks.CAUSAL, rule=causal)
    yield replace(plain, name="causal, softcap 50", softcap=50.0)


def make_inputs(case: Case) -> list[Tensor]:
    """Return q, k, v and dout, laid out as transformers has them."""
    shape = (TOKENS // case.seq, case.seq, HIDDEN // case.head_dim, case.head_dim)
    rows = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    q, k, v, dout = (row.transpose(1, 2) for row in rows)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def ours(case: Case) -> Attend:
    """Return our attention for a case."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, mask=case.mask, softcap=case.softcap)

    return attend


def flex(case: Case) -> Attend:
    """Return compiled FlexAttention for a case, its block mask made beforehand."""
    cap = case.softcap
    made = create_block_mask(case.rule, None, None, case.seq, case.seq)

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score if cap is None else cap * torch.tanh(score / cap)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=made, score_mod=None if cap is None else capped)

    compiled: Attend = torch.compile(attend, dynamic=False, fullgraph=True)
    return compiled


def results(
    attend: Attend, inputs: list[Tensor], directions: Sequence[Direction]
) -> tuple[Tensor, ...]:
    """Return the output and, where the backward is asked for too, the three gradients."""
    if Direction.BACKWARD not in directions:
        with torch.no_grad():
            return (attend(*inputs[:3]),)
    out = attend(*inputs[:3])
    return out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3])


def difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    """Return the largest relative difference (norm over norm) among corresponding tensors."""
    pairs = zip(a, b, strict=True)
    return max(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in pairs)


def timed(
    attend: Attend, inputs: list[Tensor], direction: Direction, backend: str
) -> Callable[[], object]:
    """Return the call to time, under `backend`: a forward without gradients, or a backward alone."""
    *leaves, dout = inputs

    def forward() -> object:
        with torch.no_grad(), forced_backend(backend):
            return attend(*leaves)

    if direction is Direction.FORWARD:
        return forward
    out = attend(*leaves)

    def backward() -> object:
        with forced_backend(backend):
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return backward


def compare(report: Report, case: Case, directions: Sequence[Direction], backend: Backend) -> None:
    """Add a row for each direction: ours, FlexAttention and, beside a window, our causal attention.

    Raises RuntimeError where the two results differ.
    """
    inputs = make_inputs(case)
    calls = {"ours": ours(case), "flex": flex(case)}
    with forced_backend(backend):
        found = [results(calls[name], inputs, directions) for name in ("ours", "flex")]
    apart = difference(*found)
    if not apart <= MAX_DIFFERENCE:
        raise RuntimeError(f"ours and FlexAttention differ by {apart:.3g}")
    if case.mask.kind is MaskKind.WINDOW:
        calls["causal"] = ours(replace(case, mask=masks.CAUSAL))
    for direction in directions:
        chosen = {
            name: timed(f, inputs, direction, "auto" if name == "causal" else backend)
            for name, f in calls.items()
        }
        times = times_in_turns(chosen)
        figures = {f"{name}_s": found for name, found in times.items()}
        figures["ratio"] = times["flex"] / times["ours"]
        if "causal" in times:
            figures["causal_ratio"] = times["causal"] / times["ours"]
        what = {"direction": direction.value, "backend": backend.value, "peer": "FlexAttention"}
        report.add(named(case) | what, **figures)


def named(case: Case) -> dict[str, Any]:
    """Return what a row says of its case."""
    heads = HIDDEN // case.head_dim
    return {"mask": case.name, "head_dim": case.head_dim, "heads": heads, "seq": case.seq}


def main() -> None:
    """Print a line for each row and write it as JSON; stop starting cases after `--seconds`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case after this")
    parser.add_argument(
        "--direction", type=Direction, choices=list(Direction), help="only this one"
    )
    parser.add_argument("--backend", type=Backend, choices=list(Backend), default=Backend.TRITON)
    arguments = parser.parse_args()
    directions = [arguments.direction] if arguments.direction else list(Direction)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    prepare_flex()
    report, started = Report("attention_masks", arguments.json), time.monotonic()
    for case in cases():
        if time.monotonic() - started > arguments.seconds:
            print(f"no time left for {named(case)}", flush=True)
            continue
        with report.surviving(named(case)):
            compare(report, case, directions, arguments.backend)


def prepare_flex() -> None:
    """Let FlexAttention's backward run again and again, and let nothing fall back to eager."""
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


if __name__ == "__main__":
    main()
