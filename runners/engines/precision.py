"""What a plan's precision means for dtypes and for the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

COMPUTE_DTYPES = {
    "mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "autocast": torch.float32,
}


def forward_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a forward pass runs: bf16 autocast, or none."""
    if precision == "autocast":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
