"""What a trace without a GPU cannot see: attention kernels and CUDA's autocast list.

Each stand-in allocates and keeps what the CUDA kernel allocates and keeps, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers.integrations.moe
import transformers.masking_utils
from transformers import AttentionInterface, AttentionMaskInterface

import runners.jobs.losses
from runners.trace.losses import traced_slices

TRITON_NAME = "peakmark_trace_triton"


def _attention_output(query: torch.Tensor, value: torch.Tensor, like_query: bool) -> torch.Tensor:
    """Output in (batch, seq, heads, head_dim) memory order, or in the query's.

    SDPA's kernels follow the query (aten/src/ATen/native/cudnn/MHA.cpp, alloc_with_matching_layout;
    flash_attn/flash_api.cpp, empty_like): a rotary embedding that concatenates makes it contiguous.
    """
    batch, heads, seq, _ = query.shape
    if like_query and query.is_contiguous():
        return query.new_empty(batch, heads, seq, value.shape[-1])
    out = query.new_empty(batch, seq, heads, value.shape[-1])
    return out.transpose(1, 2)


@torch.library.custom_op("peakmark_trace::attention_forward", mutates_args=())
def _attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, like_query: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and one fp32 logsumexp per query row, as one operation that a checkpoint can save."""
    out = _attention_output(q, v, like_query)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


_attention_forward.register_fake(_attention_forward._init_fn)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, _ = inputs
    ctx.set_materialize_grads(False)  # no kernel makes a gradient of the logsumexp
    ctx.save_for_backward(q, k, v, mask, *output)


def _attention_backward(ctx: Any, *grads: torch.Tensor) -> Any:
    q, k, v, *_, logsumexp = ctx.saved_tensors
    delta = torch.empty_like(logsumexp)  # row sums of dO * O, alive during the backward
    grad_q, grad_k, grad_v = (torch.empty_like(t) for t in (q, k, v))
    del delta
    return grad_q, grad_k, grad_v, None, None


_attention_forward.register_autograd(_attention_backward, setup_context=_keep)


def _fused_attention(q: Any, k: Any, v: Any, mask: Any, like_query: bool) -> torch.Tensor:
    """A fused kernel: keeps Q, K, V, the output and the logsumexp."""
    out: torch.Tensor = _attention_forward(q, k, v, mask, like_query)[0]
    return out


def _to_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if torch.is_autocast_enabled("cpu"):
        return tuple(t.to(torch.get_autocast_dtype("cpu")) for t in tensors)
    return tensors


def _math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> torch.Tensor:
    """SDPA's fallback, as it runs on plain tensors (attention.cpp, _scaled_dot_product_attention_math).

    The operation itself would add the mask out of place, since fake tensors are a subclass.
    Without `enable_gqa` the products broadcast a single key-value head.
    """
    dtype, groups = query.dtype, query.shape[1] // key.shape[1]
    query, key, value = query.float(), key.float(), value.float()
    query = query * scale**0.5
    if is_causal:
        keep = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        mask = torch.empty_like(keep, dtype=torch.float32)
        del keep
    if groups > 1 and enable_gqa:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * scale**0.5)
    if mask is not None:
        scores.add_(mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    del scores
    return torch.matmul(weights, value).to(dtype)


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
        scale = kwargs.get("scale") or query.shape[-1] ** -0.5
        is_causal = bool(kwargs.get("is_causal"))
        return _math_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return _fused_attention(query, key, value, attn_mask, like_query=True)


def _triton_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = _to_autocast(query, key, value)
    out = _fused_attention(query, key, value, None, like_query=False)
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


@torch.library.custom_op("peakmark_trace::grouped_forward", mutates_args=())
def _grouped_forward(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The output of a grouped product, as one operation that a checkpoint can save."""
    return rows.new_empty(rows.shape[0], weights.shape[-1])


_grouped_forward.register_fake(_grouped_forward._init_fn)


class _GroupedProduct(torch.autograd.Function):
    """`grouped_mm` without its alignment rules, which prime dimensions cannot meet."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        # Of frozen experts the operation keeps no rows (derivatives.yaml, _grouped_mm).
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, ends)
        ctx.empty_rows = partial(torch.empty, rows.shape, dtype=rows.dtype, device=rows.device)
        out: torch.Tensor = _grouped_forward(rows, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # As in autograd's own function, the weights' gradient comes first, and all that was saved is
        # alive until both are there: under a checkpoint nothing else holds the rows.
        saved = ctx.saved_tensors
        trains_rows, trains_weights, _ = ctx.needs_input_grad
        weights = torch.empty_like(saved[1]) if trains_weights else None
        return ctx.empty_rows() if trains_rows else None, weights, None


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _GroupedProduct.apply(rows.to(weights.dtype), weights, offs)  # type: ignore[no-untyped-call]
    return out


def _packed_rows(is_packed: bool) -> Any:
    """Make transformers find several documents in a row, or one.

    Its answer depends on values, which these tensors do not have; told that it is being traced, it
    makes its mask for several documents without looking.
    """
    masking = transformers.masking_utils
    if is_packed:
        return mock.patch.object(masking, "is_tracing", lambda tensor: True)
    return mock.patch.object(masking, "find_packed_sequence_indices", lambda positions: None)


@contextmanager
def cuda_stand_ins(is_packed: bool = False) -> Iterator[None]:
    """Make model code behave under fake CPU tensors as it does on a CUDA device.

    `is_packed`: rows hold several documents.
    """
    patch = mock.patch.object
    with ExitStack() as stack:
        stack.enter_context(patch(runners.jobs.losses, "token_slices", traced_slices))
        stack.enter_context(patch(torch.nn.functional, "scaled_dot_product_attention", fused_sdpa))
        stack.enter_context(patch(transformers.integrations.moe, "_grouped_mm", _grouped_mm))
        stack.enter_context(_packed_rows(is_packed))
        for owner, name in FP32_UNDER_CUDA_AUTOCAST:
            stack.enter_context(patch(owner, name, _upcasting(getattr(owner, name))))
        yield
