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
from kernels.attention.schedule import (
    BLOCK_KEYS,
    GROUP_ROWS,
    SECTION_BYTES,
    ForwardTile,
    ForwardWork,
    forward_masking,
    forward_table,
    forward_tile,
)


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
    """Fill out (B, Hq, Sq, D) and lse (B, Hq, Sq, fp32, contiguous) for `attention_forward`.

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
        causal=causal and seq_q > 1,
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
            CAUSAL=work.causal,
            MASK=forward_masking(work),
            REGISTERS=tile.registers,
            num_warps=4,
        )
