"""What a trace without a GPU cannot see: attention kernels and CUDA's autocast list.

Each stand-in allocates and keeps what the CUDA kernel allocates and keeps, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import transformers.integrations.moe
import transformers.masking_utils
from transformers import AttentionInterface, AttentionMaskInterface

TRITON_NAME = "peakmark_trace_triton"


def _attention_output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Output in (batch, seq, heads, head_dim) memory order, as the CUDA kernels lay it out."""
    batch, heads, seq, _ = query.shape
    out = query.new_empty(batch, seq, heads, value.shape[-1])
    return out.transpose(1, 2)


class _FusedAttention(torch.autograd.Function):
    """A fused kernel: keeps Q, K, V, the output and one fp32 logsumexp per query row."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        out = _attention_output(q, v)
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, _, _, logsumexp = ctx.saved_tensors
        delta = torch.empty_like(logsumexp)  # row sums of dO * O, alive during the backward
        grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
        del delta
        return grad_q, grad_k, grad_v, None


def _fused_attention(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    out: torch.Tensor = _FusedAttention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return out


def _to_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if torch.is_autocast_enabled("cpu"):
        return tuple(t.to(torch.get_autocast_dtype("cpu")) for t in tensors)
    return tensors


def fused_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Stand in for `scaled_dot_product_attention` on a CUDA device.

    A boolean mask becomes an additive one of the query's dtype and is kept
    (aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask). No fused kernel
    takes fp32 with grouped heads (cuDNN and flash are 16-bit, memory-efficient has no grouped
    heads: sdp_utils.cpp), nor fewer key-value heads without `enable_gqa`, as Falcon has them
    (check_batch_size_and_num_heads_dense): these cases compute and keep the scores.
    """
    query, key, value = _to_autocast(query, key, value)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    is_grouped, enable_gqa = query.shape[1] != key.shape[1], bool(kwargs.get("enable_gqa"))
    if is_grouped and (query.dtype == torch.float32 or not enable_gqa):
        math = torch.ops.aten._scaled_dot_product_attention_math
        causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
        out: torch.Tensor = math(
            query, key, value, attn_mask, 0.0, causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    return _fused_attention(query, key, value, attn_mask)


def _triton_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = _to_autocast(query, key, value)
    out = _fused_attention(query, key, value, None)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TRITON_NAME, _triton_attention)
AttentionMaskInterface.register(TRITON_NAME, lambda *args, **kwargs: None)


# Functions of model code that CUDA's autocast runs in fp32 and the CPU's does not
# (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32).
FP32_UNDER_CUDA_AUTOCAST = (
    (torch, "pow"),
    (torch, "softmax"),
    (torch.nn.functional, "softmax"),
    (torch.nn.functional, "layer_norm"),
)


def _upcasting(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        # A dtype that the caller asks for is left to it (autocast_mode.h, fp32_set_opt_dtype).
        if torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None:
            args = tuple(_upcast(a) for a in args)
        return function(*args, **kwargs)

    return call


def _upcast(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


class _GroupedProduct(torch.autograd.Function):
    """`grouped_mm` without its alignment rules, which prime dimensions cannot meet."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, weights, _ = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights), None


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _GroupedProduct.apply(rows.to(weights.dtype), weights, offs)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def cuda_stand_ins() -> Iterator[None]:
    """Make model code behave under fake CPU tensors as it does on a CUDA device."""
    patch = mock.patch.object
    with ExitStack() as stack:
        stack.enter_context(patch(torch.nn.functional, "scaled_dot_product_attention", fused_sdpa))
        stack.enter_context(patch(transformers.integrations.moe, "_grouped_mm", _grouped_mm))
        # Its answer depends on values, which fake tensors do not have; unpacked batches give None.
        stack.enter_context(
            patch(
                transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None
            )
        )
        for owner, name in FP32_UNDER_CUDA_AUTOCAST:
            stack.enter_context(patch(owner, name, _upcasting(getattr(owner, name))))
        yield
