"""Plain attention of a few query tokens against a cache, in torch: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def gathered_cache(cache: Tensor, block_table: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return a cache as (B, Hkv, S, D) in float64: pages in order, scales multiplied in.

    cache is (B, Hkv, S, D), or (pages, Hkv, page size, D) with a block table (B, pages per row);
    scale is None, (Hkv,), or as the cache without its last dimension.
    """
    values = cache.to(torch.float32).double()
    if scale is not None:
        values = values * (scale[:, None, None] if scale.dim() == 1 else scale[..., None]).double()
    if block_table is None:
        return values
    pages = values[block_table.long()]
    return pages.transpose(1, 2).flatten(2, 3)


def reference_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return (B, Hq, Sq, D): softmax over the first `lengths[b]` keys, all scores stored.

    The last query sees all of them, the one before it one key less, and so on. A query that sees no
    key gives 0. With `window` it sees that many keys up to its own. What lies behind a row's length
    is not read.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group, seq_q = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (
        gathered_cache(cache, block_table, s).to(dtype).repeat_interleave(group, 1)
        for cache, s in ((k, k_scale), (v, v_scale))
    )
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        for query in range(seq_q):
            seen = length - (seq_q - 1 - query)
            if seen <= 0:
                continue
            visible = slice(0 if window is None else max(0, seen - window), seen)
            logits = torch.einsum("hd,hkd->hk", q[row, :, query].to(dtype), k[row, :, visible])
            wide = torch.promote_types(dtype, torch.float32)
            weights = torch.softmax(logits.to(wide) * scale, -1).to(dtype)
            out[row, :, query] = torch.einsum("hk,hkd->hd", weights, v[row, :, visible])
    return out


def reference_append(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the last Sq tokens of each row into its cache, as `append_to_cache` does."""
    rows, tokens = torch.meshgrid(
        *(torch.arange(n, device=k.device) for n in (k_new.shape[0], k_new.shape[2])), indexing="ij"
    )
    positions = lengths.long()[:, None] - k_new.shape[2] + tokens
    page = k.shape[2]
    pages, places = rows, positions
    inside = positions >= 0
    if block_table is not None:
        pages = block_table.long().gather(1, (positions // page).clamp(min=0))
        places = positions % page
    pages, places, rows, tokens = (index[inside] for index in (pages, places, rows, tokens))
    for new, cache, scale in ((k_new, k, k_scale), (v_new, v, v_scale)):
        values = new[rows, :, tokens]
        if scale is not None:
            values, own = quantised(values, cache.dtype)
            scale[pages, :, places] = own
        cache[pages, :, places] = values.to(cache.dtype)


def quantised(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values (..., D) in fp8 (e4m3) or int8 and their fp32 scales, one for each D values.

    The largest of them becomes the dtype's largest, 448 or 127; int8 is rounded half up.
    """
    wide = values.float()
    largest = LARGEST[dtype]
    scale = wide.abs().amax(-1) / largest
    scaled = wide / torch.where(scale > 0, scale, 1.0)[..., None]
    if dtype == torch.int8:
        scaled = torch.floor(scaled + 0.5)
    return scaled.to(dtype), scale
