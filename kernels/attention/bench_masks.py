"""Time the portable Triton attention beside FlexAttention: `python -m kernels.attention.bench_masks`.

bf16, random normal, B * S = 32,768 tokens and H * D = 2048. FlexAttention is compiled for the same
mask (fullgraph, static shapes, no recompilation past its limit, so no eager fall-back). Every result
is compared before it is timed; times are medians of `triton.testing.do_bench`, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.attention import masks
from kernels.attention.dispatch import forced_backend
from kernels.attention.masks import Mask
from kernels.attention.triton import flash_attention

TOKENS = 32768
HIDDEN = 2048
WARMUP_MS, WINDOW_MS, ROUNDS = 25, 100, 3
WINDOW = 4096
DOCUMENT = 4096
BLOCK = 128
# Two kernels in bf16 with other orders of summation; a wrong mask is off by a tenth or more.
MAX_DIFFERENCE = 1e-2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rule = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mask at one shape: ours, and FlexAttention's rule for the same (None for no rule)."""

    name: str
    head_dim: int
    seq: int
    mask: Mask
    rule: Rule | None
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
    """Yield the bars first: causal, full and a window; then the other kinds."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (j > i - WINDOW)

    def globals_too(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & ((j > i - WINDOW) | (j < BLOCK))

    sliding, local = masks.window(WINDOW - 1), masks.global_local(BLOCK, WINDOW - 1)
    for dim in (128, 64):
        yield Case(name="window 4k", head_dim=dim, seq=TOKENS, mask=sliding, rule=window)
        yield Case(name="causal", head_dim=dim, seq=8192, mask=masks.CAUSAL, rule=causal)
        yield Case(name="full", head_dim=dim, seq=8192, mask=masks.FULL, rule=None)
    yield _document_case(128, TOKENS)
    yield _block_case(128, 8192)
    yield Case(name="global 128, window 4k", head_dim=128, seq=TOKENS, mask=local, rule=globals_too)
    capped = {"mask": masks.CAUSAL, "rule": causal, "softcap": 50.0}
    yield Case(name="causal, softcap 50", head_dim=128, seq=8192, **capped)
    for dim, seq in ((128, 2048), (64, 2048), (128, 32768), (64, 32768)):
        yield Case(name="causal", head_dim=dim, seq=seq, mask=masks.CAUSAL, rule=causal)
        yield Case(name="full", head_dim=dim, seq=seq, mask=masks.FULL, rule=None)


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
    rule, cap = case.rule, case.softcap
    sizes = {"B": None, "H": None, "Q_LEN": case.seq, "KV_LEN": case.seq}
    made = None if rule is None else create_block_mask(rule, **sizes)

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=made, score_mod=None if cap is None else capped)

    compiled: Attend = torch.compile(attend, dynamic=False, fullgraph=True)
    return compiled


def results(attend: Attend, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the output and the three gradients."""
    out = attend(*inputs[:3])
    return out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3])


def difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    """Return the largest relative difference (norm over norm) among corresponding tensors."""
    pairs = zip(a, b, strict=True)
    return max(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in pairs)


def timed(attend: Attend, inputs: list[Tensor], direction: str) -> Callable[[], object]:
    """Return the call to time: a forward without gradients, or a backward alone."""
    *leaves, dout = inputs
    if direction == "forward":
        detached = [tensor.detach() for tensor in leaves]
        return lambda: attend(*detached)
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return each call's median time in seconds, over rounds in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    options = {"warmup": WARMUP_MS, "rep": WINDOW_MS, "return_mode": "median"}
    for turn in range(ROUNDS):
        for name in sorted(calls, reverse=bool(turn % 2)):
            times[name].append(triton.testing.do_bench(calls[name], **options) / 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def compare(case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each direction: ours, FlexAttention and, for a window, our causal attention."""
    inputs = make_inputs(case)
    calls = {"ours": ours(case), "flex": flex(case)}
    apart = difference(results(calls["ours"], inputs), results(calls["flex"], inputs))
    if not apart <= MAX_DIFFERENCE:
        raise RuntimeError(f"{case.name}: ours and FlexAttention differ by {apart}")
    if case.name.startswith("window"):
        plain = {"name": "causal", "head_dim": case.head_dim, "seq": case.seq}
        calls["causal"] = ours(Case(**plain, mask=masks.CAUSAL, rule=None))
    sizes = {"mask": case.name, "head_dim": case.head_dim, "seq": case.seq}
    for direction in ("forward", "backward"):
        times = in_turns({name: timed(f, inputs, direction) for name, f in calls.items()})
        ratios = {f"{name}_ratio": times[name] / times["ours"] for name in times if name != "ours"}
        seconds = {f"{name}_s": found for name, found in times.items()}
        yield {**sizes, "direction": direction, "difference": apart, **seconds, **ratios}


def environment() -> dict[str, Any]:
    """Return what the times depend on beside the shapes."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "window_ms": WINDOW_MS,
        "rounds": ROUNDS,
    }


def main() -> None:
    """Print a line for each row and write it as JSON; stop starting cases after `--seconds`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case after this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    started = time.monotonic()
    with forced_backend("triton"):
        for case in cases():
            if time.monotonic() - started > arguments.seconds:
                print(f"no time left for {case.name}, D {case.head_dim}", flush=True)
                continue
            try:
                for row in compare(case):
                    report(row, arguments.json)
            except Exception as error:
                print(
                    f"{case.name}, D {case.head_dim}: {type(error).__name__}: {error}", flush=True
                )


def report(row: dict[str, Any], path: Path | None) -> None:
    """Print one row and append it, with its environment, to the file."""
    ratios = ", ".join(f"{k} {v:.2f}" for k, v in row.items() if k.endswith("_ratio"))
    where = f"{row['mask']:22} D {row['head_dim']:3} S {row['seq']:5} {row['direction']:8}"
    print(f"{where} ours {row['ours_s'] * 1e3:7.3f} ms, {ratios}", flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row | environment()) + "\n")


if __name__ == "__main__":
    main()
