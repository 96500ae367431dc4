"""Time large and unequal heads beside torch's attention: `python -m kernels.attention.bench_heads`.

Forward alone, bf16, random normal, B * S = 32,768 tokens, Hq * V = 2048: head size 256, and 192 for
queries and keys with 128 for values (latent attention). Ours is the `hopper` backend, beside it the
portable one. Every result is compared before it is timed; times are medians, taken in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from kernels.attention.bench import BACKENDS, TOKENS, WIDTH
from kernels.attention.dispatch import Backend, forced_backend
from kernels.attention.triton import flash_attention
from kernels.timing import Report, relative_error, report_of, require, times_in_turns

SIZES = ((256, 256), (192, 128))
SEQUENCES = (8192, 2048, 32768)
# Two kernels in bf16 with other orders of summation.
MAX_DIFFERENCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attention shape; the batch follows from TOKENS."""

    head_dim: int
    value_head_dim: int
    heads: int
    causal: bool
    seq: int

    def flops(self) -> float:
        """Return 2 * B * H * S^2 * (D + V), halved if causal."""
        flops = 2.0 * TOKENS * self.seq * self.heads * (self.head_dim + self.value_head_dim)
        return flops / 2 if self.causal else flops


def cases() -> Iterator[Case]:
    """Yield each pair of head sizes, causal and full, at each length."""
    for seq in SEQUENCES:
        for head_dim, value_head_dim in SIZES:
            for causal in (True, False):
                yield Case(
                    head_dim=head_dim,
                    value_head_dim=value_head_dim,
                    heads=WIDTH // value_head_dim,
                    causal=causal,
                    seq=seq,
                )


def make_inputs(case: Case) -> list[Tensor]:
    """Return q, k and v, laid out as transformers has them."""
    sizes = (case.head_dim, case.head_dim, case.value_head_dim)
    rows = (TOKENS // case.seq, case.seq, case.heads)
    drawn = (torch.randn(*rows, size, dtype=torch.bfloat16, device="cuda") for size in sizes)
    return [tensor.transpose(1, 2) for tensor in drawn]


def calls_of(case: Case, inputs: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Return our two backends and torch's attention as calls without arguments."""

    def ours(backend: Backend) -> Tensor:
        with forced_backend(backend):
            return flash_attention(*inputs, causal=case.causal)

    return {
        "ours": lambda: ours(Backend.HOPPER),
        "portable": lambda: ours(Backend.TRITON),
        "torch": lambda: scaled_dot_product_attention(*inputs, is_causal=case.causal),
    }


def name_backend(call: Callable[[], Tensor]) -> str:
    """Return the backend behind torch's attention, told by the name of the kernel that ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages())
    found = [backend for fragment, backend in BACKENDS.items() if fragment in names]
    return found[0] if found else f"unknown ({names[:80]})"


def compare(report: Report, case: Case) -> None:
    """Add one row; raises RuntimeError where ours and torch's results differ."""
    calls = calls_of(case, make_inputs(case))
    expected = calls["torch"]()
    for name in ("ours", "portable"):
        require(name, relative_error(calls[name](), expected), MAX_DIFFERENCE)
    peer = name_backend(calls["torch"])
    times = times_in_turns(calls)
    figures = {f"{name}_s": time for name, time in times.items()}
    figures["ours_flop_s"] = case.flops() / times["ours"]
    for name in ("torch", "portable"):
        figures[f"ratio_to_{name}"] = times[name] / times["ours"]
    report.add(asdict(case) | {"backend": Backend.HOPPER.value, "peer": peer}, **figures)


def main() -> None:
    """Print a line for each case and write it as JSON."""
    report = report_of("attention_heads")
    for case in cases():
        with report.surviving(asdict(case)):
            compare(report, case)


if __name__ == "__main__":
    main()
