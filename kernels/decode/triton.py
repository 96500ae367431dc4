"""Attention of one or a few new tokens against a long key-value cache, contiguous or paged.

The keys of a row are split over programs so that few rows fill the chip too; a second kernel combines
the parts. All query heads of a group are one tile, so each key and value is read once. A cache in fp8
or int8 is multiplied as it is (in fp16, which holds both exactly); its scales are folded into the
logits and the weights.

Allocated beside the output: nothing with one split, else 4 (D + 1) bytes per split, row, head and
query. No gradients: this is inference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.decode import device as kernels
from kernels.decode.device_bytes import byte_kernel
from kernels.decode.splits import (
    MAX_ROWS,
    MAX_SPLITS,
    Tile,
    choose_splits,
    choose_tile,
    is_even,
    packed_rows,
)
from kernels.launch import (
    INTERPRETED,
    check_dtype,
    check_like,
    check_runs_here,
    check_same_device,
    launch,
)

MAX_HEAD_DIM = 256
QUANTISED = (torch.float8_e4m3fn, torch.int8)
PLAIN = (torch.float16, torch.bfloat16, torch.float32)
FP8_CAPABILITY = (8, 9)
HAS_PTX = not INTERPRETED and torch.version.hip is None


def decode_attention(
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
    num_splits: int | None = None,
) -> Tensor:
    """Return (B, Hq, Sq, D): each query's attention over the first `lengths[b]` keys of its row.

    q (B, Hq, Sq, D), D at most 256, Sq x Hq / Hkv at most 128; the last query sees all keys, the one
    before it one less, and so on; one that sees none gives 0. k and v are (B, Hkv, S, D) or, with
    `block_table` (B, pages per row) int32, (pages, Hkv, page size, D), any strides with adjacent
    elements in D. lengths (B,) int32 or int64 count the new tokens; more than the cache holds is read
    as what it holds. Nothing behind a row's length is read, nor the pages there.

    k and v have q's dtype, or are fp8 (e4m3) or int8 under a q of fp16 or bf16, with fp32 `k_scale`
    and `v_scale`, (Hkv,) or per token as the cache without D. With `window` a query sees that many keys
    up to its own, and neither keys nor pages before them are read. `num_splits` is chosen from the shapes
    if None (never from `lengths`, which stay on the device). Raises ValueError naming the argument.
    """
    _check_queries(q, k)
    _check_cache(q, k, v, block_table)
    _check_lengths(q, lengths, block_table)
    _check_scales(k, k_scale, v_scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be a positive finite number")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}; allowed are 1 to {MAX_SPLITS}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 key, or None for all")
    q = q if q.stride(-1) == 1 else q.contiguous()
    return decode(
        q, k, v, lengths, scale, block_table, k_scale, v_scale, window or 0, num_splits or 0
    )


def _check_queries(q: Tensor, k: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have 4 dimensions")
    check_dtype("q", q, PLAIN)
    heads, seq_q, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head size {head_dim}; allowed are 1 to {MAX_HEAD_DIM}")
    if kv_heads == 0 or heads % kv_heads or heads == 0:
        raise ValueError(f"q has {heads} heads; it must be a multiple of k's {kv_heads}")
    rows = seq_q * heads // kv_heads
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(
            f"q has {seq_q} tokens for {heads // kv_heads} heads of a group, {rows} rows; allowed are "
            f"1 to {MAX_ROWS}"
        )


def _check_cache(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> None:
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be k's, {tuple(k.shape)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head size {k.shape[3]}; it must be q's, {q.shape[3]}")
    if block_table is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}; it must be q's, {q.shape[0]}")
    check_like("v", v, "k", k)
    check_same_device("k", k, "q", q)
    if k.dtype in QUANTISED:
        check_dtype("q", q, (torch.float16, torch.bfloat16))
    elif k.dtype != q.dtype:
        raise ValueError(
            f"k has dtype {k.dtype}; it must be q's, {q.dtype}, or float8_e4m3fn or int8"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}'s last dimension has stride {tensor.stride(-1)}; it must be 1"
            )


def _check_lengths(q: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}; it must be ({q.shape[0]},)")
    check_dtype("lengths", lengths, (torch.int32, torch.int64))
    check_same_device("lengths", lengths, "q", q)
    if block_table is None:
        return
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        shape = f"({q.shape[0]}, pages per row)"
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}; it must be {shape}")
    check_dtype("block_table", block_table, (torch.int32,))
    check_same_device("block_table", block_table, "q", q)
    if block_table.stride(1) != 1:
        raise ValueError("block_table's last dimension must be contiguous")


def _check_scales(k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (k.dtype in QUANTISED):
            says = "is missing" if scale is None else "is given"
            raise ValueError(f"{name} {says} for a cache of {k.dtype}; fp8 and int8 need it")
        if scale is None:
            continue
        if scale.shape not in (k.shape[1:2], k.shape[:3]):
            allowed = f"({k.shape[1]},) or {tuple(k.shape[:3])}"
            raise ValueError(f"{name} has shape {tuple(scale.shape)}; allowed are {allowed}")
        check_dtype(name, scale, (torch.float32,))
        check_same_device(name, scale, "k", k)
    if k_scale is not None and v_scale is not None and k_scale.dim() != v_scale.dim():
        raise ValueError(f"v_scale has {v_scale.dim()} dimensions; it must have k_scale's")


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a call is cut; `capacity` is the most keys that a row can have."""

    tile: Tile
    splits: int
    capacity: int
    page: int


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if INTERPRETED or device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _cut(q: Tensor, k: Tensor, block_table: Tensor | None, window: int, num_splits: int) -> _Cut:
    page = 0 if block_table is None else k.shape[2]
    capacity = k.shape[2] if block_table is None else page * block_table.shape[1]
    tile = choose_tile(q.shape[-1], k.element_size())
    visible = min(capacity, window + q.shape[2] - 1) if window else capacity
    chosen = num_splits or choose_splits(
        q.shape[0], k.shape[1], visible, tile.keys, _multiprocessors(q.device)
    )
    return _Cut(tile=tile, splits=chosen, capacity=capacity, page=page)


def _check_fp8(k: Tensor) -> None:
    if k.dtype != torch.float8_e4m3fn or INTERPRETED:
        return
    major, minor = torch.cuda.get_device_capability(k.device)
    if (major, minor) < FP8_CAPABILITY:
        raise ValueError(
            f"k is fp8, which compute capability {major}.{minor} has no instructions for"
        )


def _strides(scale: Tensor) -> tuple[int, int, int]:
    """Strides over pages, heads and tokens; a scale per head has one only."""
    if scale.dim() == 1:
        return 0, scale.stride(0), 0
    pages, heads, tokens = scale.stride()
    return pages, heads, tokens


def _kernel_for(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Any, Tensor, Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the kernel of a cache, k and v as it wants them, and its arguments and options beyond.

    One-byte caches are read by words where pairs of elements are whole.
    """
    if k_scale is None or v_scale is None:
        return kernels.decode_kernel, k, v, (), {}
    words = is_even(k.shape[3], [(int(t.storage_offset()), *t.stride()[:3]) for t in (k, v)])
    options = {"WORDS": words, "FP8": k.dtype == torch.float8_e4m3fn, "PACKED": HAS_PTX}
    options |= {"PER_TOKEN": k_scale.dim() == 3, "ONE_QUERY": q.shape[2] == 1}
    if words:
        k, v = k.view(torch.int16), v.view(torch.int16)
    return byte_kernel, k, v, (k_scale, v_scale, *map(_strides, (k_scale, v_scale))), options


@torch.library.custom_op("peakmark::decode_attention", mutates_args=())
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    num_splits: int,
) -> Tensor:
    """Return the output; the arguments are checked by `decode_attention`, window 0 is none, 0 splits are chosen."""
    check_runs_here("q", q)
    _check_fp8(k)
    cut = _cut(q, k, block_table, window, num_splits)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts, lse = (out, lengths) if cut.splits == 1 else _new_parts(q, cut.splits)
    batch, heads, seq_q, head_dim = q.shape
    kv_heads = k.shape[1]
    # One-byte caches are multiplied by halves, and a product takes at least 16 columns.
    block_d = max(16 if k_scale is None else 32, triton.next_power_of_2(head_dim))
    table = lengths if block_table is None else block_table
    kernel, k, v, extra, options = _kernel_for(q, k, v, k_scale, v_scale)
    strides = tuple(t.stride()[:3] for t in (q, k, v, out))
    sizes = (kv_heads, heads // kv_heads, seq_q, cut.capacity, cut.splits, window)
    launch(
        kernel,
        (batch * kv_heads, cut.splits),
        q,
        (
            *(q, k, v, parts, lse, lengths, table, *strides),
            *(0 if block_table is None else table.stride(0), *sizes, scale * math.log2(math.e)),
            *extra,
        ),
        WINDOWED=window > 0,
        PAGE=cut.page,
        IS_SPLIT=cut.splits > 1,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=packed_rows(seq_q, heads // kv_heads),
        BLOCK_N=cut.tile.keys,
        num_warps=cut.tile.warps,
        num_stages=cut.tile.stages,
        **options,
    )
    if cut.splits > 1:
        launch(
            kernels.combine_kernel,
            (batch * heads * seq_q,),
            q,
            (parts, lse, out, out.stride()[:3], heads, seq_q, cut.splits),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            num_warps=1,
        )
    return out


def _new_parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """The fp32 outputs of all splits and their log2-sum-exp2."""
    shape = (splits, *q.shape)
    parts = torch.empty(shape, dtype=torch.float32, device=q.device)
    return parts, torch.empty(shape[:-1], dtype=torch.float32, device=q.device)


@decode.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    num_splits: int,
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
