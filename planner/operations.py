"""What one GPU computes in a step whatever its kernels do: useful FLOPs, and the optimizer's work.

Each formula takes numbers or NumPy arrays for rows `b` and tokens per row `s`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.families import parameter_shapes
from planner.model import ModelSpec
from planner.traced import forward_flops
from planner.workload import Optimizer, Precision

Numbers = float | NDArray[np.float64]

# Passes of the update over the local elements by implementation: fused reads gradient, parameter
# and two states and writes three; the others run a kernel for every arithmetic operation.
_OPTIMIZER_PASSES = {
    Optimizer.ADAMW_FUSED: 7,
    Optimizer.ADAMW_FOREACH: 20,
    Optimizer.ADAMW_LOOP: 20,
    Optimizer.ADAMW_TRITON: 7,
    Optimizer.SGD: 8,
    # One kernel; its two states of a byte, in and out, count as one pass.
    Optimizer.ADAMW_8BIT: 4,
    # torch/optim/_adafactor.py: norms of parameter and gradient, means of rows and columns, their
    # product, clamp, rsqrt, product with the gradient, its norm, decay, sum.
    Optimizer.ADAFACTOR: 17,
    # torch/optim/_muon.py: momentum 3, Nesterov 3, cast and scale 5, five iterations of a read and a
    # sum in bf16 10, decay and sum 5; its products are counted apart.
    Optimizer.MUON: 26,
}
_NEWTON_SCHULZ_STEPS = 5


def state_bytes(precision: Precision) -> int:
    """Return the bytes of an element that the optimizer updates."""
    return 2 if precision is Precision.BF16 else 4


def update_bytes(optimizer: Optimizer, precision: Precision) -> int:
    """Return the HBM bytes that an optimizer's update moves for each element it updates."""
    return _OPTIMIZER_PASSES[optimizer] * state_bytes(precision)


def muon_flops(spec: ModelSpec) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations over all matrices of the layers.

    For [m, n] with m <= n, five times X X^T, its square and its product with X: 5 (4 m^2 n + 2 m^3).
    """
    total = 0.0
    for parameter in parameter_shapes(spec):
        if parameter.group == "layer" and len(parameter.shape) == 2:
            m, n = sorted(parameter.shape)
            total += parameter.count * _NEWTON_SCHULZ_STEPS * (4.0 * m * m * n + 2.0 * m**3)
    return total


def attended_pairs(s: Numbers, window: int | None) -> Numbers:
    """Return the query-key pairs of one row and head under a causal mask: s(s+1)/2.

    With a window w, queries beyond it see w keys each: w(w+1)/2 + (s-w)w for s > w.
    """
    reach = s if window is None else np.minimum(s, window)
    return reach * (reach + 1) / 2 + (s - reach) * reach


def _attention_pairs(spec: ModelSpec, s: Numbers) -> Numbers:
    """Return the causal pairs of all layers, windows counted."""
    windowed = spec.num_sliding_layers
    full = spec.num_layers - windowed
    pairs = full * attended_pairs(s, None)
    return pairs + windowed * attended_pairs(s, spec.sliding_window) if windowed else pairs


def multiplied_weights(spec: ModelSpec) -> int:
    """Return the weights that a token is multiplied with: all layers' and the head's.

    Of a mixture those of the router, of the experts that a token visits and of the shared ones.
    """
    hidden, routed = spec.hidden_size, spec.num_expert_layers
    attention = _input_weights(spec) + spec.attended_size * hidden
    dense = hidden * spec.mlp_products * spec.intermediate_size
    visited = spec.experts_per_token * spec.expert_size + spec.shared_expert_size
    experts = hidden * (spec.num_experts + spec.mlp_products * visited)
    layers = spec.num_layers * attention + (spec.num_layers - routed) * dense + routed * experts
    return layers + hidden * spec.vocab_size


def _input_weights(spec: ModelSpec) -> int:
    """Return one layer's weights before its attention; latent attention has three or four matrices."""
    hidden, latent = spec.hidden_size, spec.latent
    if latent is None:
        return hidden * (spec.query_size + 2 * spec.kv_size)
    queries = hidden * spec.query_size
    if latent.q_rank is not None:
        queries = latent.q_rank * (hidden + spec.query_size)
    expanded = spec.num_heads * (latent.nope_dim + latent.value_dim)
    return queries + hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * expanded


def model_flops(spec: ModelSpec, b: Numbers, s: Numbers) -> Any:
    """Return the FLOPs that one micro-batch of training needs, whatever the kernels do.

    6 x (parameters that enter a product) x tokens, plus 3 x 2 x (query and value width of all
    heads) x causal pairs for attention: the numerator of MFU (Chowdhery et al., PaLM, appendix B,
    causal pairs only).
    """
    if spec.trace is not None:
        return 3.0 * forward_flops(spec, b, s)
    widths = spec.query_size + spec.attended_size
    attention = 2.0 * b * widths * _attention_pairs(spec, s)
    return 3.0 * (2.0 * (b * s) * multiplied_weights(spec) + attention)
