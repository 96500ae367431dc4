"""Time the AdamW step beside torch's: `python -m kernels.adamw.bench` on a CUDA GPU.

A shard of fp32 parameters with 16-bit gradients and a 16-bit copy out. torch's fused AdamW wants
gradients in the parameters' dtype: the peer gets them in fp32 already, and copies afterwards. The
floor is 30 bytes per element at a measured copy's rate.
"""

from __future__ import annotations

import torch

from kernels.adamw.triton import adamw_step
from kernels.timing import (
    Report,
    copy_bytes_per_s,
    relative_error,
    report_of,
    require,
    times_in_turns,
)

COUNTS = [1 << 28]
BYTES_PER_ELEMENT = 30
OPTIONS = {"lr": 1e-4, "weight_decay": 0.1}


def compare(report: Report, copy_rate: float, count: int) -> None:
    """Check one step against torch's, then time both."""
    case = {"elements": count}
    parameter = torch.randn(count, device="cuda")
    gradient = torch.randn(count, device="cuda").bfloat16()
    theirs = torch.nn.Parameter(parameter.clone())
    theirs.grad = gradient.float()
    optimizer = torch.optim.AdamW([theirs], fused=True, **OPTIONS)
    mean, square = torch.zeros(2, count, device="cuda")
    copy, their_copy = (torch.empty(count, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def ours_step(step: int = 1) -> None:
        adamw_step(parameter, gradient, mean, square, step=step, copy=copy, **OPTIONS)

    def torch_step() -> None:
        optimizer.step()
        their_copy.copy_(theirs.detach())

    with report.surviving(case):
        ours_step()
        torch_step()
        require("parameter", relative_error(parameter, theirs.detach()), 1e-6)
        require("copy", relative_error(copy, their_copy), 1e-4)
        times = times_in_turns({"ours": ours_step, "torch": torch_step})
        report.add(
            case,
            ours_s=times["ours"],
            torch_s=times["torch"],
            share_of_copy_rate=BYTES_PER_ELEMENT * count / copy_rate / times["ours"],
            ratio_to_torch=times["torch"] / times["ours"],
        )


def main() -> None:
    """Print one line per shard; `--json FILE` appends rows."""
    report = report_of("adamw")
    rate = copy_bytes_per_s()
    for count in COUNTS:
        compare(report, rate, count)


if __name__ == "__main__":
    main()
