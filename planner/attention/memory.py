"""What each variant of one attention call holds, by name: forward, kept between, backward.

Bytes are those that tensors ask the allocator for, beside Q, K, V and the output's gradient. Runs on
an H200 counted the same to the byte, for eager, cuDNN and every variant of ours. B batch, H query heads,
K key/value heads, S sequence, D head size, e bytes per element; N = B H S^2 scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.attention.backends import BACKWARD, our_backend, sdpa_backend
from planner.attention.problem import AttentionProblem, Numbers, Variant
from planner.hardware import Gpu
from planner.memory.overheads import CONTEXT_BYTES, workspace_bytes

FP32_BYTES = 4
_ROW_PADDING = 128
_FLASH_COLUMNS = 32
# Counted in runs on an H200 (torch 2.11, cuDNN 9.19): two 8-byte scalars that are kept, and a
# workspace of each direction while it runs.
_CUDNN_SEED_BYTES, _CUDNN_WORKSPACE_BYTES = 16.0, 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of the tensors that every variant is made of, at sequence lengths `s`."""

    s: Numbers
    element: int
    query: Numbers
    key: Numbers
    rows: Numbers
    scores: Numbers

    @staticmethod
    def of(problem: AttentionProblem, s: Numbers) -> Sizes:
        """Return query [B,H,S,D], key [B,K,S,D], fp32 rows [B,H,S]; `scores` counts N elements."""
        element = problem.element_bytes
        width = problem.batch * problem.head_dim * element
        return Sizes(
            s=s,
            element=element,
            query=s * float(width * problem.heads),
            key=s * float(width * problem.kv_heads),
            rows=s * float(FP32_BYTES * problem.batch * problem.heads),
            scores=s * s * float(problem.batch * problem.heads),
        )


Held = Mapping[str, Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a variant holds at moments of its forward and backward, and what it keeps between."""

    forward: Mapping[str, Held]
    saved: Held
    backward: Mapping[str, Held]

    def forward_peak_bytes(self) -> Numbers:
        """Return the most held while the forward runs, its result and what is kept included."""
        return _most(self.forward)

    def saved_bytes(self) -> Numbers:
        """Return what the forward leaves for the backward, its result included."""
        return _total(self.saved)

    def backward_peak_bytes(self) -> Numbers:
        """Return the most held while the backward runs, results of both included."""
        return _most(self.backward)

    def peak_bytes(self) -> Numbers:
        """Return the most held in forward or backward."""
        most: Numbers = np.maximum(self.forward_peak_bytes(), self.backward_peak_bytes())
        return most


def _total(held: Held) -> Numbers:
    return sum(held.values(), start=0.0)


def _most(moments: Mapping[str, Held]) -> Numbers:
    most: Numbers = 0.0
    for held in moments.values():
        most = np.maximum(most, _total(held))
    return most


def input_bytes(problem: AttentionProblem, s: Numbers) -> Numbers:
    """Return the bytes of Q, K, V and the output's gradient."""
    sizes = Sizes.of(problem, s)
    return 2 * sizes.query + 2 * sizes.key


def outside_bytes(gpu: Gpu) -> int:
    """Return what the GPU holds beside tensors: context with kernels, workspaces of cuBLAS."""
    return CONTEXT_BYTES + workspace_bytes(gpu)


def footprint(problem: AttentionProblem, variant: Variant, gpu: Gpu, s: Numbers) -> Footprint:
    """Return what a variant holds at sequence lengths `s`."""
    sizes = Sizes.of(problem, s)
    if variant is Variant.EAGER:
        return _eager(problem, sizes)
    if variant is Variant.SDPA:
        return _sdpa(problem, sizes, sdpa_backend(problem, gpu))
    if variant is Variant.LINEAR:
        return _linear(problem, sizes)
    return _ours(problem, sizes, variant, our_backend(problem, variant, gpu, BACKWARD))


def _gradients(sizes: Sizes) -> dict[str, Numbers]:
    return {"dQ": sizes.query, "dK": sizes.key, "dV": sizes.key}


def _ours(problem: AttentionProblem, sizes: Sizes, variant: Variant, backend: str) -> Footprint:
    """Our kernel: kernels/attention/triton.py and hopper_backward.py name what they allocate."""
    kept: dict[str, Numbers] = {"output": sizes.query, "log-sum-exp": sizes.rows}
    if variant is Variant.BLOCK_SPARSE:
        blocks = np.ceil(sizes.s / problem.block)
        # int32 lists of the blocks that each block of queries sees, and that see each of keys.
        kept["block lists"] = 2 * FP32_BYTES * blocks * (blocks + 2)
    backward = {**kept, "row sums": sizes.rows, **_gradients(sizes)}
    if backend == "hopper":
        padded = np.ceil(sizes.s / _ROW_PADDING) * _ROW_PADDING
        backward["dQ in fp32"] = sizes.query * (FP32_BYTES / sizes.element)
        backward["padded rows"] = padded * float(2 * FP32_BYTES * problem.batch * problem.heads)
    return Footprint(
        forward={"the kernel": kept}, saved=kept, backward={"the gradient kernels": backward}
    )


def _linear(problem: AttentionProblem, sizes: Sizes) -> Footprint:
    """Linear attention: kernels/linear_attention/triton.py; D rounded up, chunks of 64 or 32 tokens."""
    columns, chunk = linear_tile(problem.head_dim)
    chunks = np.ceil(sizes.s / chunk)
    states = chunks * float(FP32_BYTES * problem.batch * problem.kv_heads * columns * (columns + 1))
    kept = {"output": sizes.query, "inverse sums": sizes.rows}
    backward = {
        **kept,
        **_gradients(sizes),
        "states before chunks": states,
        "states behind chunks": states,
    }
    return Footprint(
        forward={"the kernels": {**kept, "states before chunks": states}},
        saved=kept,
        backward={"the gradient kernels": backward},
    )


def linear_tile(head_dim: int) -> tuple[int, int]:
    """Return columns and tokens of a chunk of our linear attention."""
    columns = max(16, 1 << (head_dim - 1).bit_length())
    return columns, 64 if columns <= 64 else 32


def _sdpa(problem: AttentionProblem, sizes: Sizes, backend: str) -> Footprint:
    """torch's attention: results and rows by every fused kernel, a workspace by its backward."""
    if backend == "math":
        return _math(sizes)
    kept: dict[str, Numbers] = {"output": sizes.query, "log-sum-exp": sizes.rows}
    beside: dict[str, Numbers] = {}
    if backend == "cudnn":
        kept["seed and offset of the dropout"] = _CUDNN_SEED_BYTES
        beside["workspace"] = _CUDNN_WORKSPACE_BYTES
    backward = {**kept, **beside, **_gradients(sizes), **_sdpa_workspace(problem, sizes, backend)}
    return Footprint(
        forward={"the kernel": {**kept, **beside}},
        saved=kept,
        backward={"the gradient kernels": backward},
    )


def _sdpa_workspace(problem: AttentionProblem, sizes: Sizes, backend: str) -> dict[str, Numbers]:
    """What torch's backward takes beside its results.

    cuDNN: dQ in fp32, per-head dK and dV where heads share them, row sums (snapshots on an H200, as
    `attention_workspace_bytes`). Flash: the same with rows padded to 128 and columns to 32
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd).
    """
    if backend == "efficient":
        return {"row sums": sizes.rows}
    length, columns = sizes.s, problem.head_dim
    if backend == "flash":
        length = np.ceil(sizes.s / _ROW_PADDING) * _ROW_PADDING
        columns = -(-problem.head_dim // _FLASH_COLUMNS) * _FLASH_COLUMNS
    rows = length * float(FP32_BYTES * problem.batch * problem.heads)
    found: dict[str, Numbers] = {"dQ in fp32": rows * columns, "row sums": rows}
    if problem.heads != problem.kv_heads:
        found["dK and dV of each head"] = 2 * sizes.query
    return found


def _eager(problem: AttentionProblem, sizes: Sizes) -> Footprint:
    """Attention with stored scores, as transformers writes it: matmul, scale, mask, softmax, matmul.

    Every line of runners/jobs/attention_kernels.py's `eager_attention` with what autograd keeps.
    torch's softmax on CUDA casts fp16 by itself, bf16 in a kernel of its own (SoftMax.cpp), and its
    backward holds a product of its arguments (SoftMax.cu, `tmp = grad * output`).
    """
    n, e, query = sizes.scores, sizes.element, sizes.query
    mask = {"mask": sizes.s * sizes.s * float(e)} if problem.causal else {}
    repeated: Held = {"keys of each head": query, "values of each head": query, **mask}
    is_fp32 = problem.dtype == "fp32"
    probabilities = {"weights in fp32": 4 * n} | ({} if is_fp32 else {"weights": n * e})
    cast = {"scores in fp32": 4 * n} if problem.dtype == "bf16" else {}
    kept = {**probabilities, **repeated, "output": query}
    beside = {"output": query, "keys of each head": query, "dV of each head": query, **mask}
    # The gradient of the scores leaves softmax in fp32, but in fp16 where it cast itself.
    dscores = e if problem.dtype == "fp16" else FP32_BYTES
    return Footprint(
        forward={
            "the scores": {"product": n * e, "scaled scores": n * e, **repeated},
            "the softmax": {
                "masked scores": n * e,
                **cast,
                "weights in fp32": 4 * n,
                **repeated,
            },
            "the values": {"masked scores": n * e, **kept},
        },
        saved=kept,
        backward={
            "the values' backward": {
                **kept,
                "gradient of the weights": n * e,
                "dV of each head": query,
            },
            "the softmax's backward": {
                "weights in fp32": 4 * n,
                "gradient of the weights in fp32": 4 * n,
                "their product": 4 * n,
                "gradient of the scores": dscores * n,
                **beside,
            },
        },
    )


def _math(sizes: Sizes) -> Footprint:
    """torch's math backend (fp32 with grouped heads): scores, weights and a mark of what is -inf.

    aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
    """
    n, query = sizes.scores, sizes.query
    inputs = {"scaled Q": query, "keys of each head": query, "values of each head": query}
    kept = {"weights": 4 * n, **inputs, "output": query}
    return Footprint(
        forward={"the softmax": {"scores": 4 * n, "weights": 4 * n, "marks": n, **inputs}},
        saved=kept,
        backward={
            "the softmax's backward": {
                "weights": 4 * n,
                "gradient of the weights": 4 * n,
                "their product": 4 * n,
                "gradient of the scores": 4 * n,
                "output": query,
                "scaled Q": query,
                "keys of each head": query,
                "dV of each head": query,
            }
        },
    )
