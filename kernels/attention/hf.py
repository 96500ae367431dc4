"""Run Hugging Face models on the Triton attention: `attn_implementation="peakmark_triton"`.

`register()` adds both the attention function and the mask function. The kernel knows two masks,
full and causal; whatever else a model asks for is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from kernels.attention.triton import flash_attention

NAME = "peakmark_triton"
# Arguments by which models and caches ask for another kind of attention than ours.
FOREIGN_ARGUMENTS = (
    "softcap",
    "s_aux",
    "position_bias",
    "cu_seq_lens_q",
    "block_table",
    "head_mask",
)


def register() -> None:
    """Make `attn_implementation="peakmark_triton"` known to transformers; repeating it is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (out (B, S, Hq, D), None) for query (B, Hq, S, D) and key, value (B, Hkv, Sk, D).

    Raises ValueError for dropout, a mask, a window shorter than the keys, and anything else that the
    kernel cannot do.
    """
    if attention_mask is not None:
        raise _refused("a materialised attention mask", "no mask, or one that hides nothing")
    if dropout > 0:
        raise _refused(f"attention dropout {dropout}", "0; set it to 0 in the model's config")
    if sliding_window is not None and sliding_window < key.shape[2]:
        allowed = f"none, or one of at least the {key.shape[2]} keys"
        raise _refused(f"a sliding window of {sliding_window}", allowed)
    for name in FOREIGN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise _refused(f"the argument {name}", "none")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = flash_attention(query, key, value, causal=causal, scale=scaling)
    return out.transpose(1, 2), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Return None where full or bottom-right causal attention is what was asked; else ValueError.

    A mask's values cannot be read while tracing with FakeTensors: there only its kind is checked,
    and the real run checks the rest. `torch.compile` would bake that into its graph, so padding and
    packing that it cannot see are refused.
    """
    traced = detect_fake_mode() is not None and not torch.compiler.is_compiling()
    if attention_mask is not None and not traced and _hides(attention_mask, kv_length, kv_offset):
        raise _refused("padding in attention_mask", "unpadded batches of equal length")
    if mask_function is bidirectional_mask_function:
        return
    if not _is_causal(mask_function, kv_length, traced, **kwargs):
        raise _refused("a packed, windowed or custom mask", "one full or causal sequence per row")
    # The kernel aligns causal masks to the last key; an unfilled static cache is aligned elsewhere.
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise _refused("a cache with unfilled positions", "a dynamic cache or none")


def _hides(attention_mask: Tensor, kv_length: int, kv_offset: int) -> bool:
    if torch.compiler.is_compiling():
        return True
    seen = attention_mask[:, kv_offset : kv_offset + kv_length]
    return seen.shape[-1] < kv_length or not bool(seen.all())


def _is_causal(
    mask_function: Callable[..., Any],
    kv_length: int,
    traced: bool,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **_: Any,
) -> bool:
    """Say whether `mask_function` is causal, or a window or chunk that no key falls out of.

    transformers clears `allow_is_causal_skip` for packed and custom masks; it also takes every fake
    batch for packed, because it cannot read fake position ids.
    """
    if mask_function is causal_mask_function:
        return True
    whole = local_size is None or local_size >= kv_length
    custom = local_size is None and not traced
    return whole and not custom and (allow_is_causal_skip or traced)


def _refused(what: str, allowed: str) -> ValueError:
    return ValueError(f"attention {NAME!r} cannot do {what}; allowed: {allowed}")
