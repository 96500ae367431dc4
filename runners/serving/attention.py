"""Hugging Face models over our caches: `attn_implementation="peakmark_serving"`.

The model gets no cache of transformers. Its forward is called with `use_cache=False` and
`serving=Step(...)`, which reaches the attention of every layer among its keyword arguments, under
whatever name this version of transformers gives its own cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from kernels.attention import masks
from kernels.attention.triton import flash_attention
from kernels.decode.append import append_to_cache
from kernels.decode.reference import reference_append, reference_decode
from kernels.decode.triton import decode_attention
from planner.decode_run import AttentionBackend
from runners.serving.caches import Layers, LayerView

NAME = "peakmark_serving"
# Arguments by which a model asks for logits that the kernels here do not form.
_FOREIGN = ("softcap", "s_aux", "position_bias", "head_mask")


@dataclass(slots=True)
class Step:
    """One forward over some rows of a cache; `lengths` of these rows count the new tokens already.

    A row of length 0 takes no part: nothing of it is written, and its output is 0. `past` is how many tokens each of the rows had before where that is the same for all and known
    to the host, as in a prefill; None when decoding.
    """

    cache: Layers
    backend: AttentionBackend
    rows: slice
    lengths: Tensor
    past: int | None
    layers_seen: set[int] = field(default_factory=set)


def register() -> None:
    """Make `attn_implementation="peakmark_serving"` known to transformers."""
    # No mask function: models then make no mask, and none is needed.
    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    serving: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write key and value (B, Hkv, S, D) into the step's cache; return (out (B, S, Hq, V), None).

    Raises ValueError for what the kernels here cannot do.
    """
    if serving is None:
        raise ValueError(f"attention {NAME!r} needs the argument serving; this family drops it")
    for name in _FOREIGN:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention {NAME!r} cannot do the argument {name}; allowed: none")
    if attention_mask is not None or dropout > 0:
        raise ValueError(f"attention {NAME!r} takes no mask and no dropout; batches are unpadded")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    view = serving.cache.layer(layer, serving.rows)
    if view.window != sliding_window:
        raise ValueError(f"layer {layer} has a window of {sliding_window}; expected {view.window}")
    serving.layers_seen.add(layer)
    width = value.shape[-1]
    # Values narrower than keys (latent attention) are kept as wide as keys are.
    value = pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value
    lengths = serving.lengths
    scale = key.shape[-1] ** -0.5 if scaling is None else float(scaling)
    _write(serving.backend, key, value, view, lengths)
    out = _attend(serving, query, (key, value), view, lengths, scale)
    return out[..., :width].transpose(1, 2), None


def _write(
    backend: AttentionBackend, key: Tensor, value: Tensor, view: LayerView, lengths: Tensor
) -> None:
    write = append_to_cache if backend is AttentionBackend.PEAKMARK else reference_append
    scales = {"k_scale": view.k_scale, "v_scale": view.v_scale}
    write(key, value, view.k, view.v, lengths, block_table=view.block_table, **scales)


def _attend(
    step: Step,
    query: Tensor,
    fresh: tuple[Tensor, Tensor],
    view: LayerView,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    if step.past == 0:
        return _prefill(step.backend, query, *fresh, view.window, scale)
    if step.past is None or query.shape[2] == 1:
        decode = decode_attention if step.backend is AttentionBackend.PEAKMARK else _plain_decode
        options: dict[str, Any] = {
            "block_table": view.block_table, "k_scale": view.k_scale, "v_scale": view.v_scale,
        }  # fmt: skip
        return decode(query, view.k, view.v, lengths, scale=scale, window=view.window, **options)
    length = step.past + query.shape[2]
    pair = ((view.k, view.k_scale), (view.v, view.v_scale))
    k, v = (_gathered(cache, view, scales, length, query.dtype) for cache, scales in pair)
    return _prefill(step.backend, query, k, v, view.window, scale)


def _gathered(
    cache: Tensor, view: LayerView, scales: Tensor | None, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the first `length` tokens of the rows as (B, Hkv, length, D) in `dtype`."""
    if view.block_table is None:
        part = cache[:, :, :length]
        return part if scales is None else (part.float() * scales[:, :, :length, None]).to(dtype)
    pages = view.block_table[:, : -(-length // cache.shape[2])].long()
    values = cache[pages]
    if scales is not None:
        values = (values.float() * scales[pages][..., None]).to(dtype)
    return values.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _prefill(
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attend over keys whose last ones are the queries' own, causally or in a window."""
    if backend is AttentionBackend.PEAKMARK:
        mask = masks.CAUSAL if window is None else masks.window(window - 1)
        return flash_attention(query, key, value, mask=mask, scale=scale)
    seq_q, seq_k = query.shape[2], key.shape[2]
    index = torch.arange(seq_k, device=query.device)
    own = index[seq_k - seq_q :, None]
    seen = index <= own
    if window is not None:
        seen &= index > own - window
    # What no query sees may be stale: it is dropped, not only masked.
    hidden = ~seen.any(0)[:, None]
    key, value = (t.masked_fill(hidden, 0.0) for t in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
    )


def _plain_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return reference_decode(q, k, v, lengths, dtype=q.dtype, **options)
