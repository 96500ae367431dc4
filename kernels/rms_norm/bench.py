"""Time the RMS norm beside its peers: `python -m kernels.rms_norm.bench` on a CUDA GPU.

Peers: torch.nn.functional.rms_norm, and transformers' chain eagerly and under torch.compile. The
floor is the bytes that must move (forward 2, backward 3 passes over the rows) at a measured copy's
rate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from kernels.rms_norm.reference import reference_rms_norm
from kernels.rms_norm.triton import rms_norm
from kernels.timing import (
    Report,
    copy_bytes_per_s,
    relative_error,
    report_of,
    require,
    times_in_turns,
)

CASES = [(16384, 4096), (16384, 8192)]
EPS = 1e-6
Norm = Callable[[Tensor, Tensor], Tensor]


def transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The chain of transformers' Llama."""
    return reference_rms_norm(x, weight, eps=EPS, dtype=x.dtype)


def compare(report: Report, copy_rate: float, rows: int, width: int) -> None:
    """Check one case against float64, then time both directions."""
    case = {"rows": rows, "hidden_size": width}
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn_like(x)
    norms: dict[str, Norm] = {
        "ours": lambda x, w: rms_norm(x, w, eps=EPS),
        "torch": lambda x, w: torch_rms_norm(x, w.shape, w, EPS),
        "transformers": transformers_norm,
        "compiled": torch.compile(transformers_norm, dynamic=False),
    }
    with report.surviving(case):
        exact = reference_rms_norm(x[:64], weight, eps=EPS)
        plain = transformers_norm(x[:64], weight)
        require("out", relative_error(norms["ours"](x, weight)[:64], exact), 2e-3)
        require("plain out", relative_error(plain, exact), 1e-2)
        for direction, passes in (("forward", 2), ("backward", 3)):
            calls = {n: call_of(norm, direction, x, weight, grad) for n, norm in norms.items()}
            times = times_in_turns(calls)
            floor_s = passes * x.nbytes / copy_rate
            report.add(
                {**case, "direction": direction},
                **{f"{name}_s": time for name, time in times.items()},
                share_of_copy_rate=floor_s / times["ours"],
                **{f"ratio_to_{n}": times[n] / times["ours"] for n in times if n != "ours"},
            )


def call_of(
    norm: Norm, direction: str, x: Tensor, weight: Tensor, grad: Tensor
) -> Callable[[], object]:
    """Return a call of one direction alone."""
    if direction == "forward":
        return lambda: norm(x.detach(), weight.detach())
    out = norm(x, weight)
    return lambda: torch.autograd.grad(out, (x, weight), grad, retain_graph=True)


def main() -> None:
    """Print one line per case and direction; `--json FILE` appends rows."""
    report = report_of("rms_norm")
    torch._functorch.config.donated_buffer = False  # so that a compiled backward can repeat
    rate = copy_bytes_per_s()
    for case in CASES:
        compare(report, rate, *case)


if __name__ == "__main__":
    main()
