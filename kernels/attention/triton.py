"""FlashAttention for torch: exact attention that never stores the score matrix.

`flash_attention` is differentiable and works eagerly, under `torch.compile` and with FakeTensors.
Kept for the backward: q, k, v, out and lse (fp32, B x Hq x Sq). The backward allocates delta (fp32,
B x Hq x Sq), dq, dk and dv, and is deterministic. All outputs lie in memory as (B, S, H, D), so the
transpose that a transformer layer applies next is free.

The work is done by three custom operators, `peakmark::attention_forward`, `attention_delta` and
`attention_backward`, so that a tracer sees every tensor that a real run allocates.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention import device as kernels
from kernels.attention.blocks import (
    MAX_HEAD_DIM,
    MAX_SHARED_BYTES,
    Blocks,
    Pass,
    choose_blocks,
    padded_head_dim,
)

INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DELTA_ROWS = 64


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Return softmax(scale * q k^T) v, shape (B, Hq, Sq, D), without storing the scores.

    q is (B, Hq, Sq, D); k and v are (B, Hkv, Sk, D), Hq a multiple of Hkv, D at most 256, one dtype
    of fp16, bf16, fp32 (in autocast regions all three are cast as torch's own attention does).
    `causal` lets query i see key j when j <= i + Sk - Sq; a query that sees none gives 0. `scale`
    defaults to D**-0.5. Any strides; a last dimension that is not contiguous is copied first.
    Raises ValueError naming the argument at fault.
    """
    return flash_attention_with_lse(q, k, v, causal=causal, scale=scale)[0]


def flash_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) as `flash_attention`; lse (B, Hq, Sq) is fp32 and differentiable.

    lse = log(sum over visible keys of exp(scale * q k^T)), -inf for a query that sees no key.
    """
    q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    _check_shapes(q, k, v)
    _check_types(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be a positive finite number")
    q, k, v = (_with_contiguous_rows(tensor) for tensor in (q, k, v))
    return attention_forward(q, k, v, bool(causal), scale)


def _autocast(tensor: Tensor) -> Tensor:
    """Cast to the autocast dtype inside an autocast region, as scaled_dot_product_attention does."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be (B, H, S, D)")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be k's, {tuple(k.shape)}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}; it must be q's, {q.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head size {k.shape[-1]}; it must be q's, {q.shape[-1]}")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q has head size {q.shape[-1]}; allowed are 1 to {MAX_HEAD_DIM}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q has {q.shape[1]} heads; it must be a multiple of k's {k.shape[1]}")


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; allowed are float16, bfloat16, float32")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be q's, {q.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on q's device, {q.device}")


def _check_device(q: Tensor) -> None:
    """Refuse what cannot run; shapes alone can be traced anywhere, so this waits for a real run."""
    if not INTERPRETED and q.device.type != "cuda":
        raise ValueError(
            f"q is on {q.device}; it must be on a CUDA device "
            "(or set TRITON_INTERPRET=1 before Python starts, to run slowly on the CPU)"
        )
    if INTERPRETED and q.dtype == torch.bfloat16:
        raise ValueError("q is bfloat16; Triton's CPU interpreter can only do float16 and float32")


def _new_rows(like: Tensor) -> Tensor:
    """Allocate a (B, H, S, D) tensor that lies in memory as (B, S, H, D)."""
    batch, heads, seq, head_dim = like.shape
    rows = torch.empty((batch, seq, heads, head_dim), dtype=like.dtype, device=like.device)
    return rows.transpose(1, 2)


def _new_row_values(like: Tensor) -> Tensor:
    return torch.empty(like.shape[:3], dtype=torch.float32, device=like.device)


@lru_cache
def _shared_bytes(device_index: int) -> int:
    """Return the shared memory that one program may use on a CUDA device."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device_index)
    return int(properties["max_shared_mem"])


def _blocks(q: Tensor, kernel: Pass) -> Blocks:
    available = MAX_SHARED_BYTES if INTERPRETED else _shared_bytes(q.device.index)
    return choose_blocks(q.shape[-1], q.element_size(), kernel, available)


def _launch(
    kernel: Any, q: Tensor, programs: int, arguments: tuple[Any, ...], **options: Any
) -> None:
    """Run `programs` programs of `kernel` on q's device; `options` are its compile-time arguments."""
    sizes = {"HEAD_DIM": q.shape[-1], "BLOCK_D": padded_head_dim(q.shape[-1])}
    if programs == 0:
        return
    if INTERPRETED:
        kernel[(programs,)](*arguments, **sizes, **options)
        return
    with torch.cuda.device(q.device):
        kernel[(programs,)](*arguments, **sizes, **options)


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    batch, head, row, _ = tensor.stride()
    return batch, head, row


@torch.library.custom_op("peakmark::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); the arguments are checked by `flash_attention_with_lse`."""
    _check_device(q)
    batch, heads, seq_q, _ = q.shape
    out, lse = _new_rows(q), _new_row_values(q)
    blocks = _blocks(q, Pass.FORWARD)
    programs = triton.cdiv(seq_q, blocks.queries) * batch * heads
    tensors = (q, k, v, out, lse, *map(_strides, (q, k, v, out)))
    sizes = (heads, heads // k.shape[1], seq_q, k.shape[2], scale * math.log2(math.e))
    _launch(kernels.forward_kernel, q, programs, tensors + sizes, CAUSAL=causal, **blocks.options())
    return out, lse


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _new_rows(q), _new_row_values(q)


@torch.library.custom_op("peakmark::attention_delta", mutates_args=())
def attention_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return delta (fp32, B x Hq x Sq), the sum over the head size of out * dout."""
    batch, heads, seq_q, _ = out.shape
    delta = _new_row_values(out)
    programs = triton.cdiv(seq_q, DELTA_ROWS) * batch * heads
    arguments = (out, dout, delta, _strides(out), _strides(dout), heads, seq_q)
    _launch(kernels.delta_kernel, out, programs, arguments, BLOCK_M=DELTA_ROWS)
    return delta


@attention_delta.register_fake
def _(out: Tensor, dout: Tensor) -> Tensor:
    return _new_row_values(out)


@torch.library.custom_op("peakmark::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), recomputing the weights from lse."""
    _check_device(q)
    dq, dk, dv = _new_rows(q), _new_rows(k), _new_rows(v)
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_k = k.shape[1:3]
    inputs, strides = (q, k, v, dout, lse, delta), tuple(map(_strides, (q, k, v, dout)))
    sizes = (heads // kv_heads, seq_q, seq_k, scale)

    blocks = _blocks(q, Pass.KEY_GRADIENT)
    programs = triton.cdiv(seq_k, blocks.keys) * batch * kv_heads
    arguments = (*inputs, dk, dv, *strides, _strides(dk), kv_heads, *sizes)
    options = blocks.options()
    _launch(kernels.key_gradient_kernel, q, programs, arguments, CAUSAL=causal, **options)

    blocks = _blocks(q, Pass.QUERY_GRADIENT)
    programs = triton.cdiv(seq_q, blocks.queries) * batch * heads
    arguments = (*inputs, dq, *strides, _strides(dq), heads, *sizes)
    options = blocks.options()
    _launch(kernels.query_gradient_kernel, q, programs, arguments, CAUSAL=causal, **options)
    return dq, dk, dv


@attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_rows(q), _new_rows(k), _new_rows(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal, scale = inputs
    # An unused gradient stays None instead of becoming a tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)
    ctx.causal, ctx.scale = causal, scale


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else _with_contiguous_rows(dout)
    delta = attention_delta(out, dout)
    if dlse is not None:
        # d lse / d logits are the weights, so its gradient joins the softmax's row term.
        delta = delta - dlse
    grads = attention_backward(dout, q, k, v, lse, delta, ctx.causal, ctx.scale)
    return *grads, None, None


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
