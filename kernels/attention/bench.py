"""Time the Triton attention beside torch's: `python -m kernels.attention.bench` on a CUDA GPU.

Each row holds 32,768 tokens and Hq * D = 2048, bf16, random normal. FLOPs: forward 4 B Hq S^2 D,
halved if causal; backward 2.5 times that. Every result is checked before it is timed. Times are
medians of `triton.testing.do_bench` (CUDA events, L2 flushed), ours and torch's taken in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from kernels.attention.reference import reference_attention
from kernels.attention.triton import flash_attention

TOKENS = 32768
HIDDEN = 2048
WARMUP_MS, WINDOW_MS, ROUNDS = 50, 200, 3
# Kernel name fragments by which the backend that torch chose is told.
BACKENDS = {"cudnn": "cudnn", "flash_fwd": "flash", "fmha": "memory_efficient"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention shape; batch and heads follow from TOKENS and HIDDEN."""

    head_dim: int
    causal: bool
    seq: int

    def forward_flops(self) -> float:
        """Return 4 * B * Hq * S^2 * D, halved if causal."""
        flops = 4.0 * TOKENS * self.seq * HIDDEN
        return flops / 2 if self.causal else flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Ours beside torch's default attention: medians in seconds and rates."""

    head_dim: int
    causal: bool
    seq: int
    direction: str
    backend: str
    ours_s: float
    torch_s: float
    ours_flop_s: float
    torch_flop_s: float
    ratio: float


def cases() -> Iterator[Case]:
    """Yield D = 64 and 128, full and causal, S = 1k to 32k."""
    for head_dim in (64, 128):
        for causal in (False, True):
            for exponent in range(10, 16):
                yield Case(head_dim=head_dim, causal=causal, seq=2**exponent)


def make_inputs(case: Case) -> list[Tensor]:
    """Return q, k, v and dout, laid out as transformers has them."""
    shape = (TOKENS // case.seq, case.seq, HIDDEN // case.head_dim, case.head_dim)
    rows = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    q, k, v, dout = (row.transpose(1, 2) for row in rows)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Call torch's attention with the backend it chooses."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def name_backend(case: Case, inputs: list[Tensor]) -> str:
    """Return the backend behind torch's attention, told by the name of the kernel that ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch_attention(*inputs[:3], causal=case.causal)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages())
    found = [backend for fragment, backend in BACKENDS.items() if fragment in names]
    return found[0] if found else f"unknown ({names[:80]})"


def check(case: Case, inputs: list[Tensor]) -> None:
    """Assert that one head of ours errs at most twice as much as torch's against float64.

    Checks the output and the three gradients on at most the first 2,048 positions.
    """
    q, k, v, dout = (t[:1, :1, :2048].detach().clone() for t in inputs)

    def run(attention: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attention(*leaves, causal=case.causal)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    exact = run(lambda *a, **o: reference_attention(*a, **o)[0], torch.float64)
    ours, theirs = (run(f, q.dtype) for f in (flash_attention, torch_attention))
    for name, a, b, x in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
        error, allowed = (a - x).abs().max().item(), 2 * (b - x).abs().max().item()
        if not error <= allowed:
            raise RuntimeError(f"{case}: {name} errs by {error}, torch's allows {allowed}")


def median_s(call: Callable[[], object]) -> float:
    """Return the median time of `call` on the GPU."""
    time_ms = triton.testing.do_bench(call, warmup=WARMUP_MS, rep=WINDOW_MS, return_mode="median")
    return time_ms / 1e3


def compare(case: Case, direction: str) -> Row:
    """Time one direction of one case, ours and torch's in turns."""
    inputs = make_inputs(case)
    *leaves, dout = inputs

    def timed(attention: Callable[..., Tensor]) -> Callable[[], object]:
        if direction == "forward":
            detached = [tensor.detach() for tensor in leaves]
            return lambda: attention(*detached, causal=case.causal)
        out = attention(*leaves, causal=case.causal)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    calls = {"ours": timed(flash_attention), "torch": timed(torch_attention)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in sorted(calls, reverse=bool(turn % 2)):
            times[name].append(median_s(calls[name]))
    return make_row(case, direction, name_backend(case, inputs), times)


def make_row(case: Case, direction: str, backend: str, times: dict[str, list[float]]) -> Row:
    """Turn the rounds of both into one row; `ratio` is torch's time over ours."""
    ours_s, torch_s = (statistics.median(times[name]) for name in ("ours", "torch"))
    flops = case.forward_flops() * (1.0 if direction == "forward" else 2.5)
    return Row(
        **asdict(case),
        direction=direction,
        backend=backend,
        ours_s=ours_s,
        torch_s=torch_s,
        ours_flop_s=flops / ours_s,
        torch_flop_s=flops / torch_s,
        ratio=torch_s / ours_s,
    )


def format_row(row: Row) -> str:
    """Return one line of the table, rates in TFLOP/s."""
    mask = "causal" if row.causal else "full"
    rates = f"{row.ours_flop_s / 1e12:7.1f} {row.torch_flop_s / 1e12:7.1f}"
    return f"{row.head_dim:4} {mask:6} {row.seq:6} {row.direction:8} {rates} {row.ratio:6.2f}x"


def geometric_mean(values: list[float]) -> float:
    """Return exp(mean(log(values)))."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    """Print the table and the geometric mean of the ratios; optionally write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write one JSON object per row to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, cuDNN {torch.backends.cudnn.version()}")
    rows: list[Row] = []
    for case in cases():
        check(case, make_inputs(case))
        for direction in ("forward", "backward"):
            rows.append(compare(case, direction))
            print(format_row(rows[-1]), rows[-1].backend, flush=True)
    for direction in ("forward", "backward"):
        mean = geometric_mean([row.ratio for row in rows if row.direction == direction])
        print(f"{direction}: geometric mean {mean:.2f}x torch's speed")
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
