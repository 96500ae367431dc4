"""What goes before and after the fused Hopper backward: values of rows padded, dQ scaled."""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl

SCALE_BLOCK = 2048


@triton.jit
def pad_rows_kernel(
    lse: tl.tensor,
    delta: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    seq_q: tl.tensor,
    padded: tl.tensor,
    lse_factor: tl.tensor,
    delta_factor: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy lse and delta times a factor into rows of `padded` values, whose end weighs nothing.

    There, and where a query sees no key, lse is +inf times its factor's sign; delta is 0 at the end.
    """
    blocks = padded // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < seq_q
    values = tl.load(lse + row * seq_q + columns, mask=inside, other=float("-inf"))
    # A query that sees no key has lse -inf; +inf makes its weights 0 instead of NaN.
    values = tl.where(values == float("-inf"), float("inf"), values) * lse_factor
    tl.store(rows + row * padded + columns, values)
    values = tl.load(delta + row * seq_q + columns, mask=inside, other=0.0)
    tl.store(rows + (num_rows + row) * padded + columns, values * delta_factor)


@triton.jit
def scale_kernel(
    accumulator: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write accumulator * scale in the type of `out`; both are flat, with `count` elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(accumulator + index, mask=index < count)
    tl.store(out + index, (values * scale).to(out.dtype.element_ty), mask=index < count)
