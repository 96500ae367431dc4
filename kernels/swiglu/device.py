"""Triton device code of SwiGLU: a tile of one row per program, all arithmetic in fp32."""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(width: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The row of this program, its columns, and which of them exist."""
    tiles = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    columns = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    return (program // tiles).to(tl.int64), columns, columns < width


@triton.jit
def forward_kernel(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    """out = gate * sigmoid(gate) * up."""
    row, columns, inside = _tile(width, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = g * tl.sigmoid(g) * u
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    grad_stride,
    gate_stride,
    up_stride,
    width,
    BLOCK: tl.constexpr,
):
    """With s = sigmoid(gate): dUp = grad gate s, dGate = grad up s (1 + gate (1 - s))."""
    row, columns, inside = _tile(width, BLOCK)
    d = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    of_gate = d * u * s * (1.0 + g * (1.0 - s))
    place = row * width + columns
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + place, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
