"""Causal linear attention: another function than softmax attention, in time linear in the sequence.

Weights are f(q_i) . f(k_j) with f = elu + 1, divided by their sum over j <= i (Katharopoulos et al.,
arXiv 2006.16236). A model trained with softmax attention gives other results with it.

Kept for the backward: q, k, v, out and 4 bytes per row and head. Each direction allocates the states of
all chunks, 4 D (D + 1) bytes per chunk and key-value head (D rounded up to a power of two, at least 16);
the backward has two such sets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.launch import check_dtype, check_like, check_runs_here, launch
from kernels.linear_attention import device as kernels

MAX_HEAD_DIM = 128
# Rows of a state that one program sums up, and how deep it loads ahead.
STATE_ROWS, STATE_STAGES = 16, 3


def causal_linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return sum_j<=i w_ij v_j / sum_j<=i w_ij, (B, Hq, S, D); w_ij = f(q_i) . f(k_j), f = elu + 1.

    q is (B, Hq, S, D), k and v (B, Hkv, S, D), Hq a multiple of Hkv, D at most 128, one dtype of fp16,
    bf16, fp32. Sums are in fp32, products in tf32 (exact fp32 for fp32 inputs). Any strides; what is
    not rows of adjacent elements is copied first. Raises ValueError naming the argument at fault.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be (B, H, S, D)")
    check_dtype("q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_like(name, tensor, "q", q)
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be k's, {tuple(k.shape)}")
    batch, heads, seq, head_dim = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, seq, head_dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; all but its heads must be q's, {tuple(q.shape)}"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head size {head_dim}; allowed are 1 to {MAX_HEAD_DIM}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"q has {heads} heads; it must be a multiple of k's {k.shape[1]}")
    out: Tensor = linear_attention_forward(*map(_rows, (q, k, v)))[0]
    return out


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def chunk_options(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time sizes of every kernel: rows of a chunk, columns, warps, products."""
    block = max(16, triton.next_power_of_2(head_dim))
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block,
        "CHUNK": 64 if block <= 64 else 32,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 4 if block <= 64 else 8,
        "num_stages": 1,
    }


def _new_rows(like: Tensor) -> Tensor:
    """A (B, H, S, D) tensor that lies in memory as (B, S, H, D)."""
    batch, heads, seq, head_dim = like.shape
    rows = torch.empty((batch, seq, heads, head_dim), dtype=like.dtype, device=like.device)
    return rows.transpose(1, 2)


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.stride()[:3] for tensor in tensors)


def _states(a: Tensor, b: Tensor, out: Tensor, inverses: Tensor, kv_heads: int, backward: bool):
    """The sums over the chunks before each chunk of each key-value head, or behind it."""
    batch, heads, seq, head_dim = a.shape
    options = chunk_options(head_dim, a.dtype)
    chunks, block = triton.cdiv(seq, options["CHUNK"]), options["BLOCK_D"]
    shape = (batch, kv_heads, chunks, block)
    states = torch.empty((*shape, block), dtype=torch.float32, device=a.device)
    norms = torch.empty(shape, dtype=torch.float32, device=a.device)
    arguments = (a, b, out, inverses, states, norms, *_strides(a, b, out))
    sizes = (kv_heads, heads // kv_heads, seq, chunks)
    grid = (batch * kv_heads, block // STATE_ROWS)
    own = {"BACKWARD": backward, "ROWS": STATE_ROWS, "STAGES": STATE_STAGES}
    launch(kernels.state_kernel, grid, a, (*arguments, *sizes), **options, **own)
    return states, norms


@torch.library.custom_op("peakmark::linear_attention_forward", mutates_args=())
def linear_attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, 1 / sums of weights); checked by `causal_linear_attention`."""
    check_runs_here("q", q)
    out, inverses = _outputs(q)
    batch, heads, seq, head_dim = q.shape
    kv_heads = k.shape[1]
    states, norms = _states(k, v, v, inverses, kv_heads, False)
    arguments = (q, k, v, out, inverses, states, norms, *_strides(q, k, v, out))
    sizes = (heads, heads // kv_heads, seq, states.shape[2])
    grid = (states.shape[2] * batch * heads,)
    options = chunk_options(head_dim, q.dtype)
    launch(kernels.output_kernel, grid, q, (*arguments, *sizes), **options)
    return out, inverses


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return _new_rows(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@linear_attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@torch.library.custom_op("peakmark::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, inverses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dQ, dK, dV), from states made again."""
    check_runs_here("q", q)
    dq, dk, dv = _new_rows(q), _new_rows(k), _new_rows(v)
    batch, heads, seq, head_dim = q.shape
    kv_heads, options = k.shape[1], chunk_options(head_dim, q.dtype)
    inputs, strides = (q, k, v, out, dout, inverses), _strides(q, k, v, out, dout)
    states, norms = _states(k, v, v, inverses, kv_heads, False)
    chunks, group = states.shape[2], heads // kv_heads
    arguments = (*inputs, states, norms, dq, *strides, *_strides(dq), heads, group, seq, chunks)
    launch(kernels.query_gradient_kernel, (chunks * batch * heads,), q, arguments, **options)
    states, norms = _states(q, dout, out, inverses, kv_heads, True)
    sizes, grid = (kv_heads, group, seq, chunks), (chunks * batch * kv_heads,)
    for is_value, grad in ((False, dk), (True, dv)):
        arguments = (*inputs, states, norms, grad, *strides, *_strides(grad), *sizes)
        launch(kernels.key_gradient_kernel, grid, q, arguments, FOR_VALUES=is_value, **options)
    return dq, dk, dv


@linear_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, inverses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_rows(q), _new_rows(k), _new_rows(v)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
    if dout is None:
        return None, None, None
    return linear_attention_backward(_rows(dout), *ctx.saved_tensors)


linear_attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
