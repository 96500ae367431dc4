"""Time our attention beside torch's in one run: `python -m kernels.attention.bench` on a CUDA GPU.

Each case holds 32,768 tokens, bf16, random normal: as many heads as make Hq * D = 2048, and 32 query
heads over 8 key/value heads. FLOPs: forward 4 B Hq S^2 D, halved if causal; backward 2.5 times that.
Results are checked before they are timed; ours and torch's are timed in turns (`kernels.timing`).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from kernels.attention import dispatch
from kernels.attention.dispatch import Direction
from kernels.attention.reference import reference_attention
from kernels.attention.schedule import FORWARD_TILES, SECTION_BYTES, ForwardTile
from kernels.attention.triton import flash_attention
from kernels.timing import Report, times_in_turns

TOKENS = 32768
WIDTH = 2048
GROUPED_HEADS = (32, 8)
SEQUENCES = tuple(2**exponent for exponent in range(11, 16))
BACKWARD_FLOPS_FACTOR = 2.5
# Kernel name fragments by which the backend that torch chose is told.
BACKENDS = {"cudnn": "cudnn", "flash_fwd": "flash", "fmha": "memory_efficient"}
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention shape; the batch follows from TOKENS."""

    head_dim: int
    heads: int
    kv_heads: int
    causal: bool
    seq: int

    @property
    def batch(self) -> int:
        """Sequences of one call."""
        return TOKENS // self.seq

    def forward_flops(self) -> float:
        """Return 4 * B * Hq * S^2 * D, halved if causal."""
        flops = 4.0 * TOKENS * self.seq * self.heads * self.head_dim
        return flops / 2 if self.causal else flops


def cases() -> Iterator[Case]:
    """Yield D = 64 and 128, all heads alike and grouped, full and causal, S = 2k to 32k."""
    for seq in SEQUENCES:
        for head_dim in (64, 128):
            alike = (WIDTH // head_dim, WIDTH // head_dim)
            for heads, kv_heads in (alike, GROUPED_HEADS):
                for causal in (False, True):
                    yield Case(
                        head_dim=head_dim, heads=heads, kv_heads=kv_heads, causal=causal, seq=seq
                    )


def make_inputs(case: Case) -> list[Tensor]:
    """Return q, k, v and dout, laid out as transformers has them; the first three want gradients."""

    def draw(heads: int) -> Tensor:
        shape = (case.batch, case.seq, heads, case.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    q, k, v, dout = map(draw, (case.heads, case.kv_heads, case.kv_heads, case.heads))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Call torch's attention with the backend it chooses."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def name_backend(case: Case, inputs: list[Tensor]) -> str:
    """Return the backend behind torch's attention, told by the name of the kernel that ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch_attention(*inputs[:3], causal=case.causal)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages())
    found = [backend for fragment, backend in BACKENDS.items() if fragment in names]
    return found[0] if found else f"unknown ({names[:80]})"


def check(case: Case, inputs: list[Tensor], directions: Sequence[Direction]) -> None:
    """Raise RuntimeError unless one group of heads errs at most twice as much as torch's.

    Compares the output, and the three gradients where the backward is timed too, with float64, on at
    most the first 2,048 positions.
    """
    group = case.heads // case.kv_heads
    heads = (group, 1, 1, group)
    parts = (t[:1, :n, :2048].detach() for t, n in zip(inputs, heads, strict=True))
    # As the timed call lies in memory: rows first, then heads.
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in parts)

    def run(attention: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = attention(*leaves, causal=case.causal)
        if Direction.BACKWARD not in directions:
            return (out,)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    exact = run(lambda *a, **o: reference_attention(*a, **o)[0], torch.float64)
    ours, theirs = (run(f, q.dtype) for f in (flash_attention, torch_attention))
    for name, a, b, x in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=False):
        error, allowed = (a - x).abs().max().item(), 2 * (b - x).abs().max().item()
        if not error <= allowed:
            raise RuntimeError(f"{case}: {name} errs by {error}, torch's allows {allowed}")


def call_of(
    attention: Callable[..., Tensor], case: Case, inputs: list[Tensor], direction: Direction
) -> Call:
    """Return one direction of an attention function as a call without arguments."""
    *leaves, dout = inputs
    if direction is Direction.FORWARD:
        detached = [tensor.detach() for tensor in leaves]
        return lambda: attention(*detached, causal=case.causal)
    out = attention(*leaves, causal=case.causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def compare(report: Report, case: Case, directions: Sequence[Direction]) -> list[float]:
    """Time one case, ours and torch's in turns; return torch's times over ours.

    The shortest length is checked first: `check` compares as many positions of every other.
    """
    ratios: list[float] = []
    with report.surviving(asdict(case)):
        inputs = make_inputs(case)
        if case.seq == min(SEQUENCES):
            check(case, inputs, directions)
        peer = name_backend(case, inputs)
        for direction in directions:
            calls = {
                "ours": call_of(flash_attention, case, inputs, direction),
                "torch": call_of(torch_attention, case, inputs, direction),
            }
            times = times_in_turns(calls)
            figures = figures_of(case, direction, times["ours"], times["torch"])
            choice = dispatch.last_choice(direction)
            backend = choice.backend.value if choice else "triton"
            named = {"direction": direction.value, "backend": backend, "peer": peer}
            report.add(asdict(case), **named, **figures)
            ratios.append(figures["ratio"])
    return ratios


def figures_of(case: Case, direction: Direction, ours_s: float, peer_s: float) -> dict[str, float]:
    """Return times, rates, and the peer's time over ours."""
    flops = case.forward_flops()
    if direction is Direction.BACKWARD:
        flops *= BACKWARD_FLOPS_FACTOR
    return {
        "ours_s": ours_s,
        "peer_s": peer_s,
        "ours_flop_s": flops / ours_s,
        "peer_flop_s": flops / peer_s,
        "ratio": peer_s / ours_s,
    }


def candidates(head_dim: int) -> dict[str, tuple[ForwardTile, int]]:
    """Return forms of the Hopper forward to try: tile and bytes of keys and values in a section."""
    chosen = FORWARD_TILES[head_dim]
    found = {f"section {mib} MiB": (chosen, mib << 20) for mib in (8, 16, 24, 32, 40)}
    if head_dim == 64:
        found["two groups"] = (ForwardTile(64, 2, 240), SECTION_BYTES)
        found["three stages"] = (ForwardTile(64, 3, 160, stages=3), SECTION_BYTES)
    return found


def sweep(report: Report, case: Case) -> None:
    """Time every candidate form of the Hopper forward on one case, beside torch's."""
    from kernels.attention import hopper

    q, k, v, _ = (tensor.detach() for tensor in make_inputs(case))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], device=q.device)
    scale = case.head_dim**-0.5

    def form_of(tile: ForwardTile, section_bytes: int) -> Call:
        form = {"tile": tile, "section_bytes": section_bytes}
        return lambda: hopper.forward(q, k, v, out, lse, case.causal, scale, **form)

    calls: dict[str, Call] = {"torch": lambda: torch_attention(q, k, v, causal=case.causal)}
    calls |= {name: form_of(*form) for name, form in candidates(case.head_dim).items()}
    for name, time in times_in_turns(calls).items():
        report.add(asdict(case), form=name, ours_s=time, ours_flop_s=case.forward_flops() / time)


def geometric_mean(values: Sequence[float]) -> float:
    """Return exp(mean(log(values)))."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    """Print one line per case and the geometric mean of the ratios; optionally write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument(
        "--direction", type=Direction, choices=list(Direction), help="only this one"
    )
    parser.add_argument("--sweep", action="store_true", help="try forms of the Hopper forward")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    directions = [arguments.direction] if arguments.direction else list(Direction)
    report = Report("attention", arguments.json)
    ratios: dict[Direction, list[float]] = {direction: [] for direction in directions}
    for case in cases():
        if arguments.sweep:
            sweep(report, case)
            continue
        for direction, ratio in zip(directions, compare(report, case, directions), strict=False):
            ratios[direction].append(ratio)
    for direction, found in ratios.items():
        if found:
            mean = geometric_mean(found)
            print(
                f"{direction}: {mean:.3f}x torch's speed (geometric mean), worst {min(found):.3f}"
            )


if __name__ == "__main__":
    main()
