"""Triton device code of the cross-entropy over one chunk of logits.

One program per row (token). The row is read twice: once for its maximum and sum of exponentials,
once to write the gradient over it. Softmax and cap are taken in fp32.
"""

# ruff: noqa: N803 (compile-time arguments are upper case, as Triton code has them)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _capped(logits: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    """cap * tanh(logits / cap): a series near 0, where 1 - exp(-2 |x|) would lose digits."""
    if CAPPED:
        fraction = logits / cap
        small = tl.exp(-2.0 * tl.abs(fraction))
        far = tl.where(fraction < 0, small - 1.0, 1.0 - small) / (1.0 + small)
        square = fraction * fraction
        series = -17.0 / 315.0 + square * (62.0 / 2835.0)
        series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
        return tl.where(tl.abs(fraction) < 0.25, fraction * series, far) * cap
    return logits


@triton.jit
def _cap_slope(logits: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """1 - tanh(logits / cap)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|): exact where tanh is 1."""
    small = tl.exp(-2.0 * tl.abs(logits / cap))
    return 4.0 * small / ((1.0 + small) * (1.0 + small))


@triton.jit
def _normaliser(
    start: tl.tensor,
    num_classes: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """log(sum(exp(row))), with the maximum taken out."""
    largest = -float("inf")
    total = 0.0
    for first in range(0, num_classes, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_classes
        logits = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        # A capped -inf is -cap: what lies outside is taken out again behind the cap.
        logits = tl.where(inside, _capped(logits, cap, CAPPED), -float("inf"))
        higher = tl.maximum(largest, tl.max(logits, axis=0))
        # While all that was seen is -inf, -inf - -inf must not be taken.
        anchor = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(largest - anchor) + tl.sum(tl.exp(logits - anchor), axis=0)
        largest = higher
    return largest + tl.log(total)


@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    losses,
    num_labels,
    row_stride,
    num_classes,
    ignored_label,
    cap,
    CAPPED: tl.constexpr,
    MEAN: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each row's loss, and over its logits their gradient (softmax - one-hot) * scale.

    An ignored row has loss and gradient 0. A label that is no class gives NaN, never another
    class's loss. With MEAN the gradient (not the loss) is divided by `num_labels`.
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * row_stride
    label = tl.load(labels + row)
    counted = label != ignored_label
    known = (label >= 0) & (label < num_classes)
    own = tl.load(start + label, mask=counted & known, other=float("nan")).to(tl.float32)
    own = _capped(own, cap, CAPPED)
    if counted:
        normaliser = _normaliser(start, num_classes, cap, CAPPED, BLOCK)
        tl.store(losses + row, normaliser - own)
    else:
        normaliser = 0.0
        tl.store(losses + row, 0.0)
    if WITH_GRADIENT:
        scale = tl.where(known, 1.0, float("nan"))
        if MEAN:
            scale = scale / tl.load(num_labels).to(tl.float32)
        for first in range(0, num_classes, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < num_classes
            raw = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.exp(_capped(raw, cap, CAPPED) - normaliser)
            gradient = tl.where(columns == label, gradient - 1.0, gradient) * scale
            if CAPPED:
                gradient *= _cap_slope(raw, cap)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(start + columns, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(values, factor, num_values, BLOCK: tl.constexpr):
    """Multiply a flat tensor in place by a scalar on the device; touch nothing where it is 1."""
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_values
        scaled = tl.load(values + offsets, mask=inside).to(tl.float32) * scale
        tl.store(values + offsets, scaled.to(values.dtype.element_ty), mask=inside)
