"""Plain attention of a few query tokens against a cache, in torch: the measuring stick."""

from __future__ import annotations

import torch
from torch import Tensor


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
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return (B, Hq, Sq, D): softmax over the first `lengths[b]` keys, all scores stored.

    The last query sees all of them, the one before it one key less, and so on. A query that sees no
    key gives 0. What lies behind a row's length is not read.
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
            logits = torch.einsum("hd,hkd->hk", q[row, :, query].to(dtype), k[row, :, :seen])
            wide = torch.promote_types(dtype, torch.float32)
            weights = torch.softmax(logits.to(wide) * scale, -1).to(dtype)
            out[row, :, query] = torch.einsum("hk,hkd->hd", weights, v[row, :, :seen])
    return out
