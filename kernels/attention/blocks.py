"""Tile sizes of the attention kernels: a pure choice, tested and compiled without a GPU.

The tables hold, per head size rounded up, tiles that were compiled with Triton 3.6 and 3.7 and
inspected with ptxas (tests/kernels/attention/test_compiled.py keeps them honest).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_HEAD_DIM = 256
MAX_SHARED_BYTES = 227 * 1024
# Below this a device gets the portable tiles: consumer cards have 99 KiB, an A100 has 163 KiB.
LARGE_SHARED_BYTES = 200 * 1024
FP32_BYTES = 4


class Pass(StrEnum):
    """The three kernels whose tiles are chosen."""

    FORWARD = "forward"
    KEY_GRADIENT = "key_gradient"
    QUERY_GRADIENT = "query_gradient"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of queries and of keys in one tile, warps per program, and depth of the load pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int

    def within(self, block: int) -> Blocks:
        """Return a tile that divides the blocks of a block table, any where `block` is 0."""
        if block == 0:
            return self
        queries, keys = min(self.queries, block), min(self.keys, block)
        return Blocks(queries, keys, self.warps, self.stages)

    def step(self, kernel: Pass) -> int:
        """Return the rows of a tile that `kernel` walks over: queries for dK and dV, else keys."""
        return self.queries if kernel is Pass.KEY_GRADIENT else self.keys

    def options(self) -> dict[str, int]:
        """Return the launch options of a kernel."""
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Timed on an H200 (causal, S = 8,192) against tiles of half and twice the size, 4 and 8 warps, 2 and
# 3 stages. Hopper tiles stay at 64 or more on every side: 32-wide ones have read outside shared
# memory there (triton issues 10573 and 11366).
LARGE = {
    Pass.FORWARD: {
        64: Blocks(128, 64, 4, 3),
        128: Blocks(128, 64, 8, 3),
        256: Blocks(64, 64, 8, 2),
    },
    Pass.KEY_GRADIENT: {
        64: Blocks(64, 64, 4, 3),
        128: Blocks(64, 128, 8, 2),
        256: Blocks(64, 64, 8, 1),
    },
    Pass.QUERY_GRADIENT: {
        64: Blocks(128, 64, 8, 3),
        128: Blocks(128, 64, 8, 3),
        256: Blocks(64, 64, 8, 2),
    },
}
# For full masks that fill their tiles: without the code for partial tiles more registers are left.
LARGE_WHOLE = {
    Pass.FORWARD: {128: Blocks(128, 128, 8, 3)},
    Pass.KEY_GRADIENT: {128: Blocks(64, 128, 8, 3)},
    Pass.QUERY_GRADIENT: {},
}
PORTABLE = {
    Pass.FORWARD: {
        64: Blocks(128, 64, 4, 3),
        128: Blocks(64, 64, 4, 2),
        256: Blocks(64, 32, 8, 2),
    },
    Pass.KEY_GRADIENT: {
        64: Blocks(32, 128, 8, 2),
        128: Blocks(64, 64, 8, 2),
        256: Blocks(32, 32, 8, 1),
    },
    Pass.QUERY_GRADIENT: {
        64: Blocks(128, 64, 8, 2),
        128: Blocks(64, 64, 4, 2),
        256: Blocks(64, 32, 8, 1),
    },
}
# Exact fp32 products run outside the tensor cores; these tiles are for checking, not for speed.
FP32 = {64: Blocks(32, 32, 4, 1), 128: Blocks(32, 32, 8, 1), 256: Blocks(16, 16, 8, 1)}


def padded_head_dim(head_dim: int) -> int:
    """Return the columns of a tile: the power of two from `head_dim` up, at least 64."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; allowed are 1 to {MAX_HEAD_DIM}")
    return max(64, 1 << (head_dim - 1).bit_length())


def choose_blocks(
    head_dim: int,
    element_bytes: int,
    kernel: Pass,
    shared_bytes: int,
    full_length: int | None = None,
) -> Blocks:
    """Return the tile of `kernel` for a device with `shared_bytes` of shared memory per program.

    `full_length` is the length that it walks over under a full mask, None under another.
    """
    columns = padded_head_dim(head_dim)
    if element_bytes == FP32_BYTES:
        return FP32[columns]
    if shared_bytes < LARGE_SHARED_BYTES:
        return PORTABLE[kernel][columns]
    whole = LARGE_WHOLE[kernel].get(columns)
    if whole is not None and full_length is not None and full_length % whole.step(kernel) == 0:
        return whole
    return LARGE[kernel][columns]
