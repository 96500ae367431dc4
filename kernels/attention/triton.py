"""FlashAttention for torch: exact attention that never stores the score matrix.

`flash_attention` is differentiable and works eagerly, under `torch.compile` and with FakeTensors.
Kept for the backward: q, k, v, out and lse (fp32, B x Hq x Sq), and the tables of a mask and the
sinks where there are any. The backward allocates delta (fp32,
B x Hq x Sq), dq, dk and dv, and is deterministic. All outputs lie in memory as (B, S, H, D), so the
transpose that a transformer layer applies next is free.

The work is done by three custom operators, `peakmark::attention_forward`, `attention_delta` and
`attention_backward`, so that a tracer sees every tensor that a real run allocates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.attention import device, device_backward
from kernels.attention.blocks import (
    MAX_HEAD_DIM,
    MAX_SHARED_BYTES,
    Pass,
    choose_blocks,
    padded_head_dim,
)
from kernels.attention.dispatch import takes_hopper_backward, takes_hopper_forward
from kernels.attention.masks import CAUSAL, FULL, Mask, MaskKind
from kernels.launch import INTERPRETED, check_dtype, check_like, check_runs_here, launch

DELTA_ROWS = 64


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v, shape (B, Hq, Sq, V), without storing the scores.

    q is (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, V), Hq a multiple of Hkv, D and V at
    most 256, one dtype of fp16, bf16, fp32 (in autocast regions all three are cast as torch's own
    attention does). `scale` defaults to D**-0.5. Either `causal` or a `mask` (masks.py) says what a
    query sees: causal is key j when j <= i + Sk - Sq; a query that sees nothing gives 0. `softcap`
    c replaces each logit x by c * tanh(x / c). `sinks` (Hq,) adds exp(sink) to the sum that the
    weights of a head are divided by. Any strides; a last dimension that is not contiguous is copied
    first. Raises ValueError naming the argument at fault.
    """
    return flash_attention_with_lse(
        q, k, v, causal=causal, scale=scale, mask=mask, softcap=softcap, sinks=sinks
    )[0]


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) as `flash_attention`; lse (B, Hq, Sq) is fp32 and differentiable.

    lse = log(sum over visible keys and the sink of exp(logit)), -inf for a query that sees nothing.
    """
    q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    _check_shapes(q, k, v)
    check_dtype("q", q)
    check_like("k", k, "q", q)
    check_like("v", v, "q", q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    _check_positive("scale", scale)
    if softcap is not None:
        _check_positive("softcap", float(softcap))
    mask = _one_mask(causal, mask).simplified(q.shape[2], k.shape[2])
    _check_mask(mask, q, k)
    _check_sinks(sinks, q)
    q, k, v = (_with_contiguous_rows(tensor) for tensor in (q, k, v))
    return attention_forward(
        q, k, v, mask.kind is MaskKind.CAUSAL, scale, *_lowered(mask), float(softcap or 0.0), sinks
    )


def _one_mask(causal: bool | None, mask: Mask | None) -> Mask:
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}; it must be made by kernels/attention/masks.py: causal, "
            "a window, a prefix, documents or a table of blocks, never a matrix"
        )
    if (causal is None) == (mask is None):
        given = "None" if mask is None else f"of kind {mask.kind}"
        raise ValueError(f"causal is {causal} and mask is {given}; give one of them")
    if mask is not None:
        return mask
    return CAUSAL if causal else FULL


def _lowered(mask: Mask) -> tuple[str, list[int], Tensor | None, Tensor | None]:
    """Return a mask as operators take it; full and causal ones need nothing but the flag."""
    if mask.kind in (MaskKind.FULL, MaskKind.CAUSAL):
        return "", [], None, None
    numbers = [mask.left, mask.right, mask.prefix, mask.block]
    return str(mask.kind), numbers, mask.keys_of_query, mask.queries_of_key


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
    if k.shape[:3] != v.shape[:3]:
        allowed = f"k's, {tuple(k.shape)}, but for the head size"
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be {allowed}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}; it must be q's, {q.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has head size {k.shape[-1]}; it must be q's, {q.shape[-1]}")
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            allowed = f"1 to {MAX_HEAD_DIM}"
            raise ValueError(f"{name} has head size {tensor.shape[-1]}; allowed are {allowed}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q has {q.shape[1]} heads; it must be a multiple of k's {k.shape[1]}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be a positive finite number")


def _check_mask(mask: Mask, q: Tensor, k: Tensor) -> None:
    """Refuse a mask whose tables were made for other lengths, batches, heads or another device."""
    if mask.lengths is None or mask.keys_of_query is None:
        return
    lengths = (q.shape[2], k.shape[2])
    if mask.lengths != lengths:
        raise ValueError(f"mask is for {mask.lengths} queries and keys; it must be {lengths}")
    table = mask.keys_of_query
    sizes = q.shape[: table.dim() - 2]
    for name, found, allowed in zip(("batch size", "heads"), table.shape, sizes, strict=False):
        if found not in (1, allowed):
            raise ValueError(f"mask has {name} {found}; it must be 1 or q's, {allowed}")
    if table.device != q.device:
        raise ValueError(f"mask is on {table.device}; it must be on q's device, {q.device}")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    if sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it must be ({q.shape[1]},)")
    if not sinks.is_floating_point() or sinks.device != q.device:
        found = f"{sinks.dtype} on {sinks.device}"
        raise ValueError(f"sinks is {found}; it must be of a float dtype on {q.device}")


def _new_rows(like: Tensor, head_dim: int | None = None) -> Tensor:
    """Allocate a (B, H, S, D) tensor that lies in memory as (B, S, H, D)."""
    batch, heads, seq, own_dim = like.shape
    head_dim = own_dim if head_dim is None else head_dim
    rows = torch.empty((batch, seq, heads, head_dim), dtype=like.dtype, device=like.device)
    return rows.transpose(1, 2)


def _new_row_values(like: Tensor) -> Tensor:
    return torch.empty(like.shape[:3], dtype=torch.float32, device=like.device)


@lru_cache
def _shared_bytes(device_index: int) -> int:
    """Return the shared memory that one program may use on a CUDA device."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device_index)
    return int(properties["max_shared_mem"])


def _options(q: Tensor, v: Tensor, kernel: Pass, mask: _Lowered) -> dict[str, Any]:
    """Return the compile-time arguments of `kernel`: sizes of heads and tiles, and the mask's kind.

    A full mask over whole tiles has no partial ones: kernels without the code for these have more
    registers left.
    """
    available = MAX_SHARED_BYTES if INTERPRETED else _shared_bytes(q.device.index)
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    walked = q.shape[2] if kernel is Pass.KEY_GRADIENT else v.shape[2]
    full_length = walked if mask.kind == MaskKind.FULL else None
    sizes = max(head_dim, value_dim), q.element_size()
    blocks = choose_blocks(*sizes, kernel, available, full_length).within(mask.block)
    return blocks.options() | {
        "PARTIALS": full_length is None or full_length % blocks.step(kernel) > 0,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_V": padded_head_dim(value_dim),
        "MASK": mask.kind,
        "MASK_BLOCK": mask.block,
    }


class _Lowered(NamedTuple):
    """The kind and the numbers of a mask."""

    kind: str
    left: int
    right: int
    prefix: int
    block: int

    @staticmethod
    def read(causal: bool, kind: str, numbers: Sequence[int]) -> _Lowered:
        """Return what an operator's arguments say."""
        if kind:
            return _Lowered(kind, *numbers)
        plain = CAUSAL if causal else FULL
        return _Lowered(str(plain.kind), plain.left, plain.right, 0, 0)

    def bounds(self) -> tuple[int, int, int]:
        """Return the numbers that kernels take at run time."""
        return self.left, self.right, self.prefix


def _table_strides(table: Tensor | None) -> tuple[int, int]:
    """Return how far apart the parts of two batches and of two heads lie, 0 where they share one."""
    if table is None:
        return 0, 0
    batch, head = table.stride()[:2]
    shared_heads = table.dim() < 4 or table.shape[1] == 1
    return batch if table.shape[0] > 1 else 0, 0 if shared_heads else head


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    batch, head, row, _ = tensor.stride()
    return batch, head, row


@torch.library.custom_op("peakmark::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    kind: str = "",
    numbers: Sequence[int] | None = None,
    keys_of_query: Tensor | None = None,
    queries_of_key: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); the arguments are checked by `flash_attention_with_lse`.

    `kind` and what follows say a mask that is neither full nor causal, no softcap is 0.
    """
    check_runs_here("q", q)
    batch, heads, seq_q, _ = q.shape
    out, lse = _new_rows(q, v.shape[-1]), _new_row_values(q)
    mask = _Lowered.read(causal, kind, numbers or ())
    if takes_hopper_forward(q, k, v, out, mask.kind, plain=softcap == 0 and sinks is None):
        # Only here: Gluon has no interpreter, and needs Triton 3.6.
        from kernels.attention import hopper

        hopper.attend(q, k, v, out, lse, mask.left, mask.right, scale, softcap, sinks)
        return out, lse
    options = _options(q, v, Pass.FORWARD, mask) | {"CAPPED": softcap > 0}
    programs = triton.cdiv(seq_q, options["BLOCK_M"]) * batch * heads
    tensors = (q, k, v, out, lse, keys_of_query, sinks, *map(_strides, (q, k, v, out)))
    sizes = (_table_strides(keys_of_query), heads, heads // k.shape[1], seq_q, k.shape[2])
    factors = (*mask.bounds(), scale * math.log2(math.e), softcap)
    launch(device.forward_kernel, (programs,), q, tensors + sizes + factors, **options)
    return out, lse


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _new_rows(q, v.shape[-1]), _new_row_values(q)


@torch.library.custom_op("peakmark::attention_delta", mutates_args=())
def attention_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return delta (fp32, B x Hq x Sq), the sum over the head size of out * dout."""
    batch, heads, seq_q, value_dim = out.shape
    delta = _new_row_values(out)
    programs = triton.cdiv(seq_q, DELTA_ROWS) * batch * heads
    arguments = (out, dout, delta, _strides(out), _strides(dout), heads, seq_q)
    sizes = {"VALUE_DIM": value_dim, "BLOCK_V": padded_head_dim(value_dim), "BLOCK_M": DELTA_ROWS}
    launch(device.delta_kernel, (programs,), out, arguments, **sizes)
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
    kind: str = "",
    numbers: Sequence[int] | None = None,
    keys_of_query: Tensor | None = None,
    queries_of_key: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), recomputing the weights from lse."""
    check_runs_here("q", q)
    dq, dk, dv = _new_rows(q), _new_rows(k), _new_rows(v)
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_k = k.shape[1:3]
    mask = _Lowered.read(causal, kind, numbers or ())
    read_and_written = {"q": q, "k": k, "v": v, "dq": dq, "dk": dk}
    if takes_hopper_backward(read_and_written, mask.kind, plain=softcap == 0):
        from kernels.attention import hopper_backward

        results, bounds = (dq, dk, dv), (mask.left, mask.right)
        hopper_backward.backward((q, k, v), dout, lse, delta, results, *bounds, scale)
        return dq, dk, dv
    inputs, strides = (q, k, v, dout, lse, delta), tuple(map(_strides, (q, k, v, dout)))
    sizes = (heads // kv_heads, seq_q, seq_k, *mask.bounds(), scale, softcap)

    options = _options(q, v, Pass.KEY_GRADIENT, mask) | {"CAPPED": softcap > 0}
    programs = triton.cdiv(seq_k, options["BLOCK_N"]) * batch * kv_heads
    outputs = (*strides, _strides(dk), _strides(dv), _table_strides(queries_of_key), kv_heads)
    arguments = (*inputs, dk, dv, queries_of_key, *outputs, *sizes)
    launch(device_backward.key_gradient_kernel, (programs,), q, arguments, **options)

    options = _options(q, v, Pass.QUERY_GRADIENT, mask) | {"CAPPED": softcap > 0}
    programs = triton.cdiv(seq_q, options["BLOCK_M"]) * batch * heads
    outputs = (*strides, _strides(dq), _table_strides(keys_of_query), heads)
    arguments = (*inputs, dq, keys_of_query, *outputs, *sizes)
    launch(device_backward.query_gradient_kernel, (programs,), q, arguments, **options)
    return dq, dk, dv


@attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_rows(q), _new_rows(k), _new_rows(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal, scale, kind, numbers, keys_of_query, queries_of_key, softcap, sinks = inputs
    # An unused gradient stays None instead of becoming a tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, keys_of_query, queries_of_key, sinks)
    ctx.mask, ctx.softcap = (causal, scale, kind, numbers), softcap


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tables, sinks = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else _with_contiguous_rows(dout)
    delta = attention_delta(out, dout)
    if dlse is not None:
        # d lse / d logits are the weights, so its gradient joins the softmax's row term.
        delta = delta - dlse
    mask = (*ctx.mask, *tables, ctx.softcap)
    grads = attention_backward(dout, q, k, v, lse, delta, *mask)
    dsinks = None if sinks is None else _sink_gradient(sinks, lse, delta)
    return *grads, None, None, None, None, None, None, None, dsinks


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient (Hq,) of the sinks: a sink's value is 0, so its logit's is -weight * delta."""
    # Only a sink of -inf leaves a log-sum-exp of -inf; its weight is 0, not exp(-inf - -inf).
    weights = torch.exp(sinks.float()[:, None] - lse.masked_fill(lse == -torch.inf, 0.0))
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
