"""Start Triton kernels on the device of their tensors, or in the interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> None:
    """Raise ValueError for a tensor whose dtype is not among `allowed`."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{name} has dtype {tensor.dtype}; allowed are {names}")


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError where dtype or device of `tensor` is not that of `other`."""
    if tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; it must be {other_name}'s, {other.dtype}"
        )
    check_same_device(name, tensor, other_name, other)


def check_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError where `tensor` is not on the device of `other`."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}; it must be on {other_name}'s device, {other.device}"
        )


def check_runs_here(name: str, tensor: Tensor) -> None:
    """Refuse what cannot run; shapes alone can be traced anywhere, so this waits for a real run."""
    if not INTERPRETED and tensor.device.type != "cuda":
        raise ValueError(
            f"{name} is on {tensor.device}; it must be on a CUDA device "
            "(or set TRITON_INTERPRET=1 before Python starts, to run slowly on the CPU)"
        )
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        raise ValueError(
            f"{name} is bfloat16; Triton's CPU interpreter can only do float16 and float32"
        )


def launch(
    kernel: Any, grid: tuple[int, ...], on: Tensor, arguments: tuple[Any, ...], **options: Any
) -> None:
    """Run `kernel` over `grid` on the device of `on`; `options` are its compile-time arguments."""
    if 0 in grid:
        return
    if INTERPRETED:
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(on.device):
        kernel[grid](*arguments, **options)
