"""Run Hugging Face models on the Triton attention: `attn_implementation="peakmark_triton"`.

`register()` adds both the attention function and the mask function. The mask function tells what a
model asks for from transformers' own rules: full, causal, a sliding window, packed documents. The
rest comes as arguments: softcap, sinks (s_aux), cumulative lengths. Whatever else a model asks for
is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from kernels.attention import masks
from kernels.attention.masks import Mask
from kernels.attention.triton import flash_attention

NAME = "peakmark_triton"
# Arguments by which models and caches ask for another kind of attention than ours.
FOREIGN_ARGUMENTS = ("position_bias", "block_table", "head_mask")
# The masks of the packed rows of a step, made once for all layers: by the lengths' own tensor.
_documents: WeakIdKeyDictionary = WeakIdKeyDictionary()


def register() -> None:
    """Make `attn_implementation="peakmark_triton"` known to transformers; repeating it is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (out (B, S, Hq, V), None) for query (B, Hq, S, D), key (B, Hkv, Sk, D), value (.., V).

    `attention_mask` is what `attention_mask` below returned; `cu_seq_lens_q` and `cu_seq_lens_k`
    hold where packed documents end. Raises ValueError for dropout, a materialised mask, and
    anything else that the kernel cannot do.
    """
    if isinstance(attention_mask, Tensor):
        raise _refused("a materialised attention mask", "no mask, or one that hides nothing")
    if dropout > 0:
        raise _refused(f"attention dropout {dropout}", "0; set it to 0 in the model's config")
    for name in FOREIGN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise _refused(f"the argument {name}", "none")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = attention_mask
    if cu_seq_lens_q is not None:
        ends = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        mask = _packed_mask(ends, (query, key), sliding_window if causal else None, causal)
    elif mask is None:
        mask = _unpacked_mask(key.shape[2], sliding_window, causal)
    out = flash_attention(query, key, value, mask=mask, scale=scaling, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2), None


def _unpacked_mask(kv_length: int, window: int | None, causal: bool) -> Mask:
    """Return the mask of one sequence per row; `window` counts the query's own token."""
    if window is None or window >= kv_length:
        return masks.CAUSAL if causal else masks.FULL
    if not causal:
        allowed = f"none, or one of at least the {kv_length} keys"
        raise _refused(f"a sliding window of {window} without a causal mask", allowed)
    return masks.window(window - 1)


def _packed_mask(
    ends: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], window: int | None, causal: bool
) -> Mask:
    """Return the mask of packed documents, made once for tensors of cumulative lengths."""
    if rows[0].shape[0] != 1:
        raise _refused(f"cu_seq_lens_q in a batch of {rows[0].shape[0]}", "a batch of 1")
    lengths = tuple(row.shape[2] for row in rows)
    left, right = None if window is None else window - 1, 0 if causal else None
    # A tensor of lengths may be written anew in place, which its version tells.
    key = (*lengths, left, right, ends[1].data_ptr(), *(end._version for end in ends))
    made = _documents.setdefault(ends[0], {})
    if key not in made:
        ends_q, ends_k = ends
        made[key] = masks.documents(
            ends_q, lengths[0], ends_k, lengths[1], left=left, right=right
        )  # fmt: skip
    return made[key]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask | None:
    """Return the mask that was asked for, None for full and bottom-right causal; else ValueError.

    A mask's values cannot be read while tracing with FakeTensors: there only its kind is checked,
    and the real run checks the rest. `torch.compile` reads neither values nor what a composed mask
    holds: these it leaves to a call between two graphs (an error where it is told to make one).
    """
    plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    if torch.compiler.is_compiling() and not (plain and attention_mask is None):
        call = _mask_outside_graphs
    else:
        call = _mask_of
    return call(q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


def _mask_of(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Mask | None:
    traced = not torch.compiler.is_compiling() and detect_fake_mode() is not None
    if attention_mask is not None and not traced and _hides(attention_mask, kv_length, kv_offset):
        raise _refused("padding in attention_mask", "unpadded batches of equal length")
    if mask_function is bidirectional_mask_function:
        return None
    asked: _Asked | None = _Asked(causal=True)
    if not _is_causal(mask_function, kv_length, traced, **kwargs):
        asked = _read(mask_function)
    if asked is None or not asked.causal:
        allowed = "full or causal attention, with a sliding window, or packed by position_ids"
        raise _refused("a chunked, blockwise or custom mask", allowed)
    # The kernel aligns causal masks to the last key; an unfilled static cache is aligned elsewhere.
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise _refused("a cache with unfilled positions", "a dynamic cache or none")
    left = None if asked.window is None else asked.window - 1
    # transformers takes every traced batch for packed, because it cannot read its position ids.
    if asked.documents is not None and not traced and _are_several(asked.documents):
        return masks.labelled(asked.documents, left=left)
    return None if left is None or left + 1 >= kv_length else masks.window(left)


_mask_outside_graphs = torch.compiler.disable(_mask_of)


def _are_several(documents: Tensor) -> bool:
    """Whether any row holds more than one document."""
    return not bool((documents == documents[:, :1]).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a mask function of transformers asks for: causality, a window, documents (B, S)."""

    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None


def _read(function: Callable[..., Any]) -> _Asked | None:
    """Read a mask function that transformers composed; None where any part of it is unknown.

    transformers hands over closures alone. Their names and what they hold are read, so a part that
    another version names otherwise is unknown, and refused.
    """
    if function is causal_mask_function:
        return _Asked(causal=True)
    held = getclosurevars(function).nonlocals
    match function.__qualname__.split(".")[0]:
        case "sliding_window_overlay":
            return _Asked(window=held["sliding_window"])
        case "packed_sequence_mask_function":
            return _Asked(documents=held["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            # Inside a document positions rise by one, as indices do.
            return _read(held["mask_function"])
        case "and_masks":
            return _joined([_read(part) for part in held["mask_functions"]])
    return None


def _joined(parts: list[_Asked | None]) -> _Asked | None:
    """Return what all parts ask for together; None for an unknown part or two of one kind."""
    known = [part for part in parts if part is not None]
    windows = [part.window for part in known if part.window is not None]
    documents = [part.documents for part in known if part.documents is not None]
    if len(known) < len(parts) or len(windows) > 1 or len(documents) > 1:
        return None
    return _Asked(
        causal=any(part.causal for part in known),
        window=windows[0] if windows else None,
        documents=documents[0] if documents else None,
    )


def _hides(attention_mask: Tensor, kv_length: int, kv_offset: int) -> bool:
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
