"""Tile sizes of the attention kernels: a pure choice, tested and compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_HEAD_DIM = 256
MAX_SHARED_BYTES = 227 * 1024


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

    def options(self) -> dict[str, int]:
        """Return the launch options of a kernel."""
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
def padded_head_dim(d):
    return max(64, 1 << (d-1).bit_length())
def choose_blocks(head_dim, element_bytes, kernel, available):
    return Blocks(64, 64,4,2)
