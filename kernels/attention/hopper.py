"""Host side of the Hopper kernels: descriptors, tile lists and launches.

`kernels.attention.dispatch` decides whether a call may come here. Imported only then: Gluon is there
from Triton 3.6 on, and has no interpreter.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from kernels.attention.hopper_common import tile_descriptor
from kernels.attention.hopper_forward import forward_kernel
from kernels.attention.hopper_single import single_forward_kernel
from kernels.attention.masks import UNBOUNDED
from kernels.attention.schedule import (
    BLOCK_KEYS,
    GROUP_ROWS,
    SECTION_BYTES,
    ForwardTile,
    ForwardWork,
    SingleTile,
    SingleWork,
    forward_masking,
    forward_table,
    forward_tile,
    is_persistent,
    single_tile,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: int,
    right: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Fill out (B, Hq, Sq, V) and lse (B, Hq, Sq, fp32, contiguous) by one of the two kernels.

    q is (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, V), bf16 or fp16, D and V at most 256,
    no dimension empty, strides as `tile_descriptor` wants them. A query sees `left` keys before its
    own and `right` after it, UNBOUNDED for all: causal is a right of 0. No softcap is 0.
    """
    lower = None if left >= UNBOUNDED else left
    upper = None if right >= UNBOUNDED else right
    is_plain = softcap == 0 and sinks is None
    if is_plain and is_persistent(q.shape[-1], v.shape[-1], lower, upper):
        forward(q, k, v, out, lse, right == 0, scale)
    else:
        single_forward(q, k, v, out, lse, lower, upper, scale, softcap=softcap, sinks=sinks)


@lru_cache(maxsize=64)
def tile_list(work: ForwardWork, device: torch.device) -> Tensor:
    """Return the tile list of `work` on `device`, int32, kept for the next call of its shape.

    4 (1 + workers + tiles) bytes: tens of KiB. The planner's ledger names it.
    """
    return torch.tensor(forward_table(work, _workers(device)), dtype=torch.int32).to(device)


@lru_cache
def _workers(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    *,
    tile: ForwardTile | None = None,
    section_bytes: int = SECTION_BYTES,
) -> None:
    """Fill out (B, Hq, Sq, D) and lse (B, Hq, Sq, fp32, contiguous) by the persistent kernel.

    q is (B, Hq, Sq, D), k and v (B, Hkv, Sk, D), bf16 or fp16, D at most 128, no dimension empty,
    strides as `tile_descriptor` wants them. `tile` and `section_bytes` are for trying out forms.
    """
    batch, heads, seq_q, head_dim = q.shape
    tile = tile or forward_tile(head_dim)
    kv_heads, seq_k = k.shape[1:3]
    work = ForwardWork(
        seq_q=seq_q,
        seq_k=seq_k,
        heads=batch * heads,
        group=heads // kv_heads,
        tile=tile,
        section_bytes=section_bytes,
        # One query that is aligned to the last key sees every key.
        right=0 if causal and seq_q > 1 else None,
    )
    q_d, out_d = (tile_descriptor(tensor, GROUP_ROWS, tile.columns) for tensor in (q, out))
    k_d, v_d = (tile_descriptor(tensor, BLOCK_KEYS, tile.columns) for tensor in (k, v))
    lists = tile_list(work.dealt(), q.device)
    workers = min(_workers(q.device), work.heads * work.row_tiles)
    sizes = (seq_q, seq_k, heads, work.group, work.row_tiles)
    with torch.cuda.device(q.device):
        forward_kernel[(workers,)](
            *(q_d, k_d, v_d, out_d, lse, lists, scale * math.log2(math.e), *sizes),
            NC=tile.groups,
            BM=GROUP_ROWS,
            BN=BLOCK_KEYS,
            D=tile.columns,
            STAGES=tile.stages,
            CAUSAL=work.right is not None,
            MASK=forward_masking(work),
            REGISTERS=tile.registers,
            num_warps=4,
        )


def single_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: int | None,
    right: int | None,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tile: SingleTile | None = None,
) -> None:
    """Fill out and lse as `attend` by the other kernel; a bound is None where there is none.

    Holds `sinks` (Hq,) in one piece and, with a right bound alone, a list of tiles. `tile` is for
    trying out forms.
    """
    batch, heads, seq_q, head_dim = q.shape
    tile = tile or single_tile(head_dim, v.shape[-1])
    kv_heads, seq_k = k.shape[1:3]
    work = SingleWork(seq_q=seq_q, seq_k=seq_k, left=left, right=right, tile=tile).bounded()
    q_d, out_d = (tile_descriptor(tensor, GROUP_ROWS, tile.columns) for tensor in (q, out))
    k_d, v_d = (tile_descriptor(tensor, tile.keys, tile.columns) for tensor in (k, v))
    qx_d, kx_d = q_d, k_d
    if tile.extra:
        qx_d = tile_descriptor(q, GROUP_ROWS, tile.extra)
        kx_d = tile_descriptor(k, tile.keys, tile.extra)
    factor, inner = (softcap, scale / softcap) if softcap else (scale, 0.0)
    numbers = (factor * math.log2(math.e), inner)
    tiles, group = work.row_tiles * batch * heads, heads // kv_heads
    lists = lse
    if work.is_listed:
        dealt = ForwardWork(
            seq_q=seq_q, seq_k=seq_k, heads=batch * heads, group=group, tile=tile, right=work.right
        )
        lists = tile_list(dealt, q.device)
    sizes = (seq_q, seq_k, heads, group, work.upper, work.lower, tiles)
    with torch.cuda.device(q.device):
        single_forward_kernel[(min(tiles, _workers(q.device)),)](
            *(q_d, k_d, v_d, out_d, qx_d, kx_d, lse),
            *(lse if sinks is None else sinks.contiguous(), lists, *numbers, *sizes),
            NC=tile.groups,
            BM=GROUP_ROWS,
            BN=tile.keys,
            D=tile.columns,
            EXTRA=tile.extra,
            STAGES=tile.stages,
            RIGHT=work.right is not None,
            LEFT=work.left is not None,
            CAPPED=softcap > 0,
            SINKS=sinks is not None,
            OWN_OUT=tile.has_own_out,
            REGISTERS=tile.registers,
            num_warps=4,
        )
