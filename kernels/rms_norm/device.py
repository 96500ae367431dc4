"""Triton device code of the RMS norm. A row lies in one tile; all arithmetic is in fp32."""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(x, weight, out, inverses, x_stride, width, eps, BLOCK: tl.constexpr):
    """One row: out = x * inverse * weight; keeps inverse = 1 / sqrt(mean(x^2) + eps)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    tl.store(inverses + row, inverse)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = values * inverse * scale
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad,
    x,
    weight,
    inverses,
    grad_x,
    partials,
    grad_stride,
    x_stride,
    num_rows,
    width,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows first, first + programs, ...: their dX, and the sum of their part of dW.

    With n = x * inverse and g = grad * weight: dX = (g - n * mean(g n)) * inverse, dW = sum(grad n).
    """
    first = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.range(first, num_rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(number, tl.int64)
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        normed = values * inverse
        total += above * normed
        scaled = above * scale
        mean = tl.sum(scaled * normed, axis=0) / width
        result = (scaled - normed * mean) * inverse
        tl.store(grad_x + row * width + columns, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(partials + first.to(tl.int64) * width + columns, total, mask=inside)


@triton.jit
def weight_gradient_kernel(
    partials, out, num_partials, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS of dW: the sum of the partial rows, in a fixed order, rounded once."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_partials, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < num_partials)[:, None] & (columns < width)[None, :]
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.load(partials + places, mask=inside, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=columns < width)
