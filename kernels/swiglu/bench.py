"""Time SwiGLU beside its peers: `python -m kernels.swiglu.bench` on a CUDA GPU.

Peers: torch's silu(gate) * up, eagerly and under torch.compile. The floor is the bytes that must
move (forward 3, backward 5 passes) at a measured copy's rate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._functorch.config
from torch import Tensor

from kernels.swiglu.reference import reference_swiglu
from kernels.swiglu.triton import swiglu
from kernels.timing import (
    Report,
    copy_bytes_per_s,
    peak_bytes,
    relative_error,
    report_of,
    require,
    times_in_turns,
)

CASES = [(8192, 14336)]
Gated = Callable[[Tensor, Tensor], Tensor]


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The chain of transformers' MLP."""
    return torch.nn.functional.silu(gate) * up


def compare(report: Report, copy_rate: float, rows: int, width: int) -> None:
    """Check one case against float64, then time both directions and weigh a step."""
    case = {"rows": rows, "intermediate_size": width}
    gate, up, grad = torch.randn(3, rows, width, device="cuda", dtype=torch.bfloat16)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    chains: dict[str, Gated] = {
        "ours": swiglu,
        "torch": torch_swiglu,
        "compiled": torch.compile(torch_swiglu, dynamic=False),
    }
    with report.surviving(case):
        exact = reference_swiglu(gate[:64], up[:64])
        require("out", relative_error(swiglu(gate, up)[:64], exact), 2e-3)
        for direction, passes in (("forward", 3), ("backward", 5)):
            calls = {n: call_of(chain, direction, gate, up, grad) for n, chain in chains.items()}
            times = times_in_turns(calls)
            report.add(
                {**case, "direction": direction},
                **{f"{name}_s": time for name, time in times.items()},
                share_of_copy_rate=passes * gate.nbytes / copy_rate / times["ours"],
                **{f"ratio_to_{n}": times[n] / times["ours"] for n in times if n != "ours"},
            )
            del calls
        peaks = {n: peak_bytes(step_of(chain, gate, up, grad)) for n, chain in chains.items()}
        report.add(case, **{f"{name}_peak_bytes": peak for name, peak in peaks.items()})


def step_of(chain: Gated, gate: Tensor, up: Tensor, grad: Tensor) -> Callable[[], object]:
    """Return a call of forward and backward."""
    return lambda: torch.autograd.grad(chain(gate, up), (gate, up), grad)


def call_of(
    chain: Gated, direction: str, gate: Tensor, up: Tensor, grad: Tensor
) -> Callable[[], object]:
    """Return a call of one direction alone."""
    if direction == "forward":
        return lambda: chain(gate.detach(), up.detach())
    out = chain(gate, up)
    return lambda: torch.autograd.grad(out, (gate, up), grad, retain_graph=True)


def main() -> None:
    """Print one line per case and direction; `--json FILE` appends rows."""
    report = report_of("swiglu")
    torch._functorch.config.donated_buffer = False  # so that a compiled backward can repeat
    rate = copy_bytes_per_s()
    for case in CASES:
        compare(report, rate, *case)


if __name__ == "__main__":
    main()
