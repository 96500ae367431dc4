"""Time the rotary embedding beside its peers: `python -m kernels.rope.bench` on a CUDA GPU.

Peers: transformers' chain, eagerly and under torch.compile. The floor is q and k read and written
once at a measured copy's rate; the backward is the same kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.rope.reference import reference_rope
from kernels.rope.triton import apply_rope
from kernels.timing import (
    Report,
    copy_bytes_per_s,
    relative_error,
    report_of,
    require,
    times_in_turns,
)

# Batch, sequence, query heads, key heads, head size.
CASES = [(4, 4096, 32, 8, 128)]


def transformers_rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """The chain of transformers' Llama."""
    return tuple(reference_rope(x, cos, sin, dtype=x.dtype) for x in (q, k))


def compare(
    report: Report, copy_rate: float, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Check one case against float64, then time the forward."""
    case = {"batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    rows = torch.randn(batch, seq, heads + kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    q, k = (x.contiguous().transpose(1, 2) for x in rows.split([heads, kv_heads], dim=2))
    cos, sin = torch.randn(2, 1, seq, head_dim, device="cuda", dtype=torch.bfloat16)
    chains = {
        "ours": apply_rope,
        "transformers": transformers_rope,
        "compiled": torch.compile(transformers_rope, dynamic=False),
    }
    with report.surviving(case):
        exact = reference_rope(q[:1, :2], cos, sin)
        found = apply_rope(q, k, cos, sin)[0][:1, :2]
        require("q", relative_error(found, exact), 2e-3)
        calls = {n: lambda chain=chain: chain(q, k, cos, sin) for n, chain in chains.items()}
        times = times_in_turns(calls)
        report.add(
            case,
            **{f"{name}_s": time for name, time in times.items()},
            share_of_copy_rate=2 * (q.nbytes + k.nbytes) / copy_rate / times["ours"],
            **{f"ratio_to_{n}": times[n] / times["ours"] for n in times if n != "ours"},
        )


def main() -> None:
    """Print one line per case; `--json FILE` appends rows."""
    report = report_of("rope")
    rate = copy_bytes_per_s()
    for case in CASES:
        compare(report, rate, *case)


if __name__ == "__main__":
    main()
