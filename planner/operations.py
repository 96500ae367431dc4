"""What one GPU computes in a step: FLOPs and HBM bytes of every kind of operation.

Each formula takes numbers or NumPy arrays for rows `b` and tokens per row `s`. FLOPs of
element-wise operations are not counted: their time is set by the bytes they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.families import parameter_shapes
from planner.model import ModelSpec
from planner.traced import forward_flops, step_costs
from planner.workload import Attention, Checkpointing, Optimizer, Precision, TrainingWorkload

Numbers = float | NDArray[np.float64]

# HBM bytes per element of one RMSNorm as transformers writes it, each kernel reading and writing:
# cast up 6, square 8, mean 4, scale 8, cast down 6, weight 4; without the casts in fp32.
_RMS_NORM_BYTES = {2: 36, 4: 28}
_NORMS_PER_LAYER = {"gemma2": 4, "gemma3_text": 4, "falcon": 1}
_LAYER_NORM_FAMILIES = ("gpt2", "gpt_neox", "opt", "falcon")
_HEAD_NORM_FAMILIES = ("qwen3", "olmo2", "qwen3_moe", "gemma3_text")

# Passes over HBM, in elements: x*cos, rotated half, its *sin, sum; two residual sums (3 each);
# activation and product with the up projection; gelu_new as nine separate kernels, one for others.
_ROPE_PASSES = 9
_RESIDUAL_PASSES = 6
_GATED_ACTIVATION_PASSES = 5
_PLAIN_ACTIVATION_PASSES = {"gpt2": 18}
_ONE_KERNEL_PASSES = 2
_MOE_SHUFFLE_PASSES = 4

# Passes of the update over the local elements by implementation: fused reads gradient, parameter
# and two states and writes three; the others run a kernel for every arithmetic operation.
_OPTIMIZER_PASSES = {
    Optimizer.ADAMW_FUSED: 7,
    Optimizer.ADAMW_FOREACH: 20,
    Optimizer.ADAMW_LOOP: 20,
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

# Backward over forward: two products for one; flash attention computes the scores once more.
_BACKWARD = 2.0
_FLASH_BACKWARD = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementSizes:
    """Bytes of an element where tensors enter products and where they only stream through."""

    matmul_bytes: int
    stream_bytes: int
    state_bytes: int


_SIZES = {
    Precision.MIXED: ElementSizes(matmul_bytes=2, stream_bytes=2, state_bytes=4),
    Precision.BF16: ElementSizes(matmul_bytes=2, stream_bytes=2, state_bytes=2),
    Precision.FP32: ElementSizes(matmul_bytes=4, stream_bytes=4, state_bytes=4),
    Precision.AUTOCAST: ElementSizes(matmul_bytes=2, stream_bytes=4, state_bytes=4),
}


def element_sizes(precision: Precision) -> ElementSizes:
    """Return the element sizes that a training precision implies."""
    return _SIZES[precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs and HBM bytes of one kind of operation."""

    name: str
    flops: Numbers
    bytes: Numbers
    backward_flops: float = _BACKWARD

    def scaled(self, prefix: str, times: float, flops_times: float | None = None) -> Cost:
        """Return the cost of doing this `times` over, FLOPs by their own factor where given."""
        factor = times if flops_times is None else flops_times
        return Cost(
            name=f"{prefix}.{self.name}", flops=self.flops * factor, bytes=self.bytes * times
        )


def matmul(name: str, rows: Numbers, inner: float, columns: float, element_bytes: int) -> Cost:
    """Return a product [rows, inner] x [inner, columns]: 2mkn FLOPs, each operand once."""
    moved = rows * inner + inner * columns + rows * columns
    return Cost(name=name, flops=2.0 * rows * inner * columns, bytes=moved * element_bytes)


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


def _computed_pairs(spec: ModelSpec, attention: Attention, s: Numbers) -> Numbers:
    """Return the pairs a kernel computes over all layers.

    Eager computes the whole square. SDPA skips half of it when causal, but gets a mask and
    computes the square where a window applies. Ours skips what a window hides, too.
    """
    square = s * s
    if attention is Attention.EAGER:
        return spec.num_layers * square
    if attention is Attention.TRITON:
        return _attention_pairs(spec, s)
    causal = attended_pairs(s, None)
    if spec.sliding_window is None:
        return spec.num_layers * causal
    windowed = np.where(np.asarray(s) > spec.sliding_window, square, causal)
    return (spec.num_layers - spec.num_sliding_layers) * causal + spec.num_sliding_layers * windowed


def attention_costs(
    spec: ModelSpec, attention: Attention, sizes: ElementSizes, b: Numbers, s: Numbers
) -> list[Cost]:
    """Return the costs of QK^T, softmax and PV over all layers; 2D FLOPs per pair and head each.

    Fused kernels move q, k, v, the output and an fp32 log-sum-exp per row. Eager also moves its
    score matrix: written and read in compute type 5 times, and 8 bytes per element for the fp32
    softmax between; a logit cap adds 6 passes.
    """
    if spec.family == "falcon":
        # Its one key-value head without grouping has no fused kernel: SDPA computes the scores.
        attention = Attention.EAGER
    tokens, layers, element = b * s, spec.num_layers, sizes.matmul_bytes
    pairs = 2.0 * b * _computed_pairs(spec, attention, s)
    score_flops, value_flops = pairs * spec.query_size, pairs * spec.attended_size
    moved_bytes = layers * tokens * element
    score_bytes = moved_bytes * (spec.query_size + spec.kv_size)
    value_bytes = moved_bytes * (spec.attended_size + spec.num_kv_heads * spec.value_dim)
    if attention is not Attention.EAGER:
        lse_bytes = layers * tokens * spec.num_heads * 4
        return [
            Cost(
                name="attention_scores",
                flops=score_flops,
                bytes=score_bytes + lse_bytes,
                backward_flops=_FLASH_BACKWARD,
            ),
            Cost(
                name="attention_values",
                flops=value_flops,
                bytes=value_bytes,
                backward_flops=_FLASH_BACKWARD,
            ),
        ]
    scores = layers * b * spec.num_heads * s * s
    passes = 3 if spec.attention_logit_softcap is None else 9
    return [
        Cost(name="attention_scores", flops=score_flops, bytes=score_bytes + scores * element),
        Cost(name="attention_softmax", flops=0.0, bytes=scores * (passes * element + 8)),
        Cost(name="attention_values", flops=value_flops, bytes=value_bytes + scores * element),
    ]


def _over(layers: int, costs: list[Cost]) -> list[Cost]:
    return [Cost(name=c.name, flops=c.flops * layers, bytes=c.bytes * layers) for c in costs]


def _expert_costs(spec: ModelSpec, tokens: Numbers, element: int) -> list[Cost]:
    """Return the products of one layer's router, the experts a token visits and shared ones."""
    hidden, inner, products = spec.hidden_size, spec.expert_size, spec.mlp_products
    routed = tokens * spec.experts_per_token
    visited = np.minimum(float(spec.num_experts), routed)
    moved = routed * (hidden + inner) * products + visited * products * hidden * inner
    experts = Cost(
        name="experts", flops=2.0 * routed * hidden * inner * products, bytes=moved * element
    )
    router = matmul("router", tokens, hidden, spec.num_experts, element)
    if not spec.shared_expert_size:
        return [router, experts]
    shared = products * spec.shared_expert_size
    return [router, experts, matmul("shared_experts", tokens, hidden, shared, element)]


def _mlp_costs(spec: ModelSpec, tokens: Numbers, element: int) -> list[Cost]:
    """Return the products of the MLPs of all layers, dense ones and mixtures of experts."""
    dense, costs = spec.num_layers - spec.num_expert_layers, []
    if dense:
        columns = spec.mlp_products * spec.intermediate_size
        costs = _over(dense, [matmul("mlp", tokens, spec.hidden_size, columns, element)])
    if spec.num_expert_layers:
        costs += _over(spec.num_expert_layers, _expert_costs(spec, tokens, element))
    return costs


def _input_projections(spec: ModelSpec, tokens: Numbers, element: int) -> list[Cost]:
    """Return the products of one layer before its attention; latent attention has three or four."""
    hidden, latent = spec.hidden_size, spec.latent
    if latent is None:
        columns = spec.query_size + 2 * spec.kv_size
        return [matmul("qkv_projection", tokens, hidden, columns, element)]
    queries = [("query_projection", hidden, spec.query_size)]
    if latent.q_rank is not None:
        queries = [
            ("query_down_projection", hidden, latent.q_rank),
            ("query_projection", latent.q_rank, spec.query_size),
        ]
    expanded = spec.num_heads * (latent.nope_dim + latent.value_dim)
    products = [
        *queries,
        ("kv_down_projection", hidden, latent.kv_rank + latent.rope_dim),
        ("kv_projection", latent.kv_rank, expanded),
    ]
    return [matmul(name, tokens, inner, columns, element) for name, inner, columns in products]


def projection_costs(spec: ModelSpec, sizes: ElementSizes, tokens: Numbers) -> list[Cost]:
    """Return the matrix products of all layers: q, k, v, output, MLP or experts."""
    element = sizes.matmul_bytes
    attention = [
        *_input_projections(spec, tokens, element),
        matmul("output_projection", tokens, spec.attended_size, spec.hidden_size, element),
    ]
    return [*_over(spec.num_layers, attention), *_mlp_costs(spec, tokens, element)]


def _norm_bytes_per_token(spec: ModelSpec, element: int) -> float:
    """Return the bytes that the norms of all layers move for one token."""
    width = _NORMS_PER_LAYER.get(spec.family, 2) * spec.hidden_size
    if spec.family in _LAYER_NORM_FAMILIES:
        return float(spec.num_layers * width * 2 * element)
    if spec.family in _HEAD_NORM_FAMILIES:
        width += spec.query_size + spec.kv_size
    if spec.latent is not None:
        width += (spec.latent.q_rank or 0) + spec.latent.kv_rank
    return float(spec.num_layers * width * _RMS_NORM_BYTES[element])


def _rotary_width(spec: ModelSpec) -> int:
    """Return the elements of queries and keys that rotary positions turn; MLA's keys share theirs."""
    key_heads = 1 if spec.latent else spec.num_kv_heads
    return spec.rotary_dim * (spec.num_heads + key_heads)


def _elementwise_bytes_per_token(spec: ModelSpec, element: int) -> float:
    """Return the bytes of residual sums, rotary positions and activations of all layers."""
    hidden, routed = spec.hidden_size, spec.num_expert_layers
    plain = _PLAIN_ACTIVATION_PASSES.get(spec.family, _ONE_KERNEL_PASSES)
    activation = plain if spec.mlp_products == 2 else _GATED_ACTIVATION_PASSES
    expert_width = spec.experts_per_token * spec.expert_size + spec.shared_expert_size
    everywhere = _RESIDUAL_PASSES * hidden + _ROPE_PASSES * _rotary_width(spec)
    dense = activation * spec.intermediate_size
    experts = activation * expert_width + _MOE_SHUFFLE_PASSES * hidden * spec.experts_per_token
    passes = spec.num_layers * everywhere + (spec.num_layers - routed) * dense + routed * experts
    return float(passes * element)


def _streaming_costs(spec: ModelSpec, sizes: ElementSizes, tokens: Numbers) -> list[Cost]:
    """Return the costs bound by memory alone over all layers: norms; rotary, sums, activation."""
    element = sizes.stream_bytes
    moved = _elementwise_bytes_per_token(spec, element)
    return [
        Cost(name="norms", flops=0.0, bytes=tokens * _norm_bytes_per_token(spec, element)),
        Cost(name="elementwise", flops=0.0, bytes=tokens * moved),
    ]


def layer_costs(
    spec: ModelSpec, attention: Attention, sizes: ElementSizes, b: Numbers, s: Numbers
) -> list[Cost]:
    """Return the forward costs of all decoder layers for one micro-batch."""
    return [
        *projection_costs(spec, sizes, b * s),
        *attention_costs(spec, attention, sizes, b, s),
        *_streaming_costs(spec, sizes, b * s),
    ]


def end_costs(spec: ModelSpec, sizes: ElementSizes, tokens: Numbers) -> list[Cost]:
    """Return the forward costs around the layers: embedding, head product, cross-entropy.

    The loss reads the logits, writes them in fp32, and runs log-softmax and selection over them.
    """
    hidden, vocabulary = spec.hidden_size, spec.vocab_size
    logits = tokens * vocabulary
    caps = 0 if spec.final_logit_softcap is None else 6 * sizes.matmul_bytes
    return [
        Cost(name="embedding", flops=0.0, bytes=2.0 * tokens * hidden * sizes.stream_bytes),
        matmul("head", tokens, hidden, vocabulary, sizes.matmul_bytes),
        Cost(name="loss", flops=0.0, bytes=logits * (sizes.matmul_bytes + 12 + caps)),
    ]


def _weight_cast_costs(spec: ModelSpec, precision: Precision) -> list[Cost]:
    """Return the cost of casting fp32 weights for torch.autocast: 4 bytes read, 2 written."""
    if precision is not Precision.AUTOCAST:
        return []
    weights = sum(p.total_numel for p in parameter_shapes(spec) if len(p.shape) > 1)
    return [Cost(name="weight_casts", flops=0.0, bytes=6.0 * weights)]


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


def optimizer_cost(
    workload: TrainingWorkload, sizes: ElementSizes, local_elements: Numbers
) -> Cost:
    """Return the cost of the update of this rank's elements.

    With an fp32 master copy the gradient is cast up (2 + 4 bytes) and the parameter cast down.
    """
    element_bytes = _OPTIMIZER_PASSES[workload.optimizer] * sizes.state_bytes
    casts_bytes = 12 if workload.precision is Precision.MIXED else 0
    return Cost(
        name="optimizer", flops=0.0, bytes=local_elements * float(element_bytes + casts_bytes)
    )


def training_costs(
    spec: ModelSpec, workload: TrainingWorkload, b: Numbers, s: Numbers
) -> list[Cost]:
    """Return the forward, recompute and backward costs of all micro-batches of one step.

    The backward of a product is two products of its size; with full checkpointing every layer's
    forward runs once more.
    """
    if spec.trace is not None:
        return _traced_costs(spec, workload, b, s)
    sizes = element_sizes(workload.precision)
    layers = layer_costs(spec, workload.attention, sizes, b, s)
    forward = [
        *layers,
        *end_costs(spec, sizes, b * s),
        *_weight_cast_costs(spec, workload.precision),
    ]
    again = layers if workload.checkpointing is Checkpointing.FULL else []
    count = float(workload.grad_accumulation)
    return [
        *(cost.scaled("forward", count) for cost in forward),
        *(cost.scaled("recompute", count) for cost in again),
        *(
            cost.scaled("backward", count * _BACKWARD, count * cost.backward_flops)
            for cost in forward
        ),
    ]


def _traced_costs(
    spec: ModelSpec, workload: TrainingWorkload, b: Numbers, s: Numbers
) -> list[Cost]:
    """Return what a traced step's operations cost: FLOPs of products, bytes read and written by all.

    The traced backward has the recomputation in it.
    """
    count = float(workload.grad_accumulation)
    return [
        Cost(name=name, flops=flops * count, bytes=moved * count)
        for name, flops, moved in step_costs(spec, workload, b, s)
    ]


def model_flops(spec: ModelSpec, b: Numbers, s: Numbers) -> Any:
    """Return the FLOPs that one micro-batch of training needs, whatever the kernels do.

    6 x (parameters that enter a product) x tokens, plus 3 x 2 x (query and value width of all
    heads) x causal pairs for attention: the numerator of MFU (Chowdhery et al., PaLM, appendix B,
    causal pairs only).
    """
    if spec.trace is not None:
        return 3.0 * forward_flops(spec, b, s)
    sizes = element_sizes(Precision.BF16)
    products = [*projection_costs(spec, sizes, b * s), end_costs(spec, sizes, b * s)[1]]
    widths = spec.query_size + spec.attended_size
    attention = 2.0 * b * widths * _attention_pairs(spec, s)
    return 3.0 * (sum(cost.flops for cost in products) + attention)
