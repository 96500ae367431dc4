"""Triton device code of AdamW over a flat shard: every value is read and written once."""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    parameter,
    gradient,
    mean,
    square,
    copy,
    decay,
    beta1,
    new1,
    beta2,
    new2,
    root_correction,
    eps,
    step_size,
    count,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step in place, in fp32, without fused multiply-adds; COPIES also writes a rounded copy."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    grad = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(parameter + places, mask=inside, other=0.0)
    first = tl.load(mean + places, mask=inside, other=0.0) * beta1 + grad * new1
    second = tl.load(square + places, mask=inside, other=0.0) * beta2 + (grad * grad) * new2
    root = tl.div_rn(tl.sqrt_rn(second), root_correction) + eps
    value = old * decay - tl.div_rn(first, root) * step_size
    tl.store(parameter + places, value, mask=inside)
    tl.store(mean + places, first, mask=inside)
    tl.store(square + places, second, mask=inside)
    if COPIES:
        tl.store(copy + places, value.to(copy.dtype.element_ty), mask=inside)
