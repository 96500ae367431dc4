"""Write new keys and values into a key-value cache: one kernel, scales of one-byte caches made with it.

Where a token goes follows from its row's length and block table, which stay on the device: nothing
waits for the host, so it can be part of a CUDA graph. It allocates nothing.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.decode import append_device as kernels
from kernels.decode.reference import LARGEST
from kernels.launch import check_dtype, check_like, check_runs_here, check_same_device, launch


def append_to_cache(
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
    """Write k_new and v_new (B, Hkv, Sq, D) as the last Sq of the `lengths[b]` tokens of each row.

    The cache, its lengths (which count the new tokens) and its block table are as in
    `decode_attention`; fp8 and int8 caches take scales per token, which are written too. A row of fewer tokens than Sq takes its last
    ones, a row of none nothing. The table must name a page for every position that is written.
    Raises ValueError naming the argument.
    """
    _check_new(k_new, v_new, k, v, lengths)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(name, scale, k)
    if block_table is not None:
        check_dtype("block_table", block_table, (torch.int32,))
        check_same_device("block_table", block_table, "k", k)
        if block_table.dim() != 2 or block_table.shape[0] != k_new.shape[0]:
            shape = f"({k_new.shape[0]}, pages per row)"
            raise ValueError(
                f"block_table has shape {tuple(block_table.shape)}; it must be {shape}"
            )
    elif k.shape[0] != k_new.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}; it must be k_new's, {k_new.shape[0]}")
    k_new, v_new = (t if t.stride(-1) == 1 else t.contiguous() for t in (k_new, v_new))
    append(k_new, v_new, k, v, lengths, block_table, k_scale, v_scale)


def _check_new(k_new: Tensor, v_new: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if tensor.dim() != 4 or tensor.shape[1] != k.shape[1] or tensor.shape[3] != k.shape[3]:
            shape = f"(B, {k.shape[1]}, Sq, {k.shape[3]})"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
        check_dtype(name, tensor)
        check_same_device(name, tensor, "k", k)
    if v_new.shape != k_new.shape or v.shape != k.shape:
        raise ValueError("v_new and v must have the shapes of k_new and k")
    check_like("v", v, "k", k)
    if k.dtype not in LARGEST and k.dtype != k_new.dtype:
        raise ValueError(f"k has dtype {k.dtype}; it must be k_new's, {k_new.dtype}, fp8 or int8")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("the last dimension of k and v must be contiguous")
    if lengths.shape != k_new.shape[:1]:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}; it must be k_new's batch")
    check_dtype("lengths", lengths, (torch.int32, torch.int64))


def _check_scale(name: str, scale: Tensor | None, k: Tensor) -> None:
    if (scale is not None) != (k.dtype in LARGEST):
        says = "is missing" if scale is None else "is given"
        raise ValueError(f"{name} {says} for a cache of {k.dtype}; fp8 and int8 need it")
    if scale is not None and (scale.shape != k.shape[:3] or scale.dtype != torch.float32):
        found = f"{scale.dtype} of shape {tuple(scale.shape)}"
        raise ValueError(f"{name} is {found}; it must be float32 of shape {tuple(k.shape[:3])}")


@torch.library.custom_op("peakmark::append_to_cache", mutates_args=("k", "v", "k_scale", "v_scale"))
def append(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write; the arguments are checked by `append_to_cache`."""
    check_runs_here("k_new", k_new)
    batch, kv_heads, seq_q, head_dim = k_new.shape
    paged = block_table is not None
    page = k.shape[2] if paged else 0
    table = lengths if block_table is None else block_table
    capacity = k.shape[2] if block_table is None else page * block_table.shape[1]
    scales = (k_new if k_scale is None else k_scale, v_new if v_scale is None else v_scale)
    strides = [t.stride()[:3] for t in (k_new, v_new, k, v)]
    strides += [(0, 0, 0) if scale is None else scale.stride() for scale in (k_scale, v_scale)]
    launch(
        kernels.append_kernel,
        (batch * kv_heads * seq_q,),
        k_new,
        (
            *(k_new, v_new, k, v, lengths, table, *scales, *strides),
            *(table.stride(0), kv_heads, seq_q, capacity),
        ),
        PAGE=page,
        LARGEST=LARGEST.get(k.dtype, 0.0),
        ROUNDS=k.dtype == torch.int8,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=1,
    )


@append.register_fake
def _(
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    return None
