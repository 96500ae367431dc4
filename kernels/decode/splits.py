"""How a decode step is cut: pure choices, tested without a GPU.

One program reads the keys of one key-value head of one row for all query heads that share it. Few
rows leave most of the chip idle; then the keys are split over several programs and a second kernel
combines their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROWS = 16
MAX_ROWS = 128
MAX_SPLITS = 128
# Programs that a multiprocessor holds at once: two pipelines keep its loads going.
PROGRAMS_PER_MULTIPROCESSOR = 2
# A count is good enough when its last wave is this full, of what the best count reaches.
GOOD_ENOUGH = 0.85
# A split should read some tiles, or its start and its part of the combination cost more than it saves.
MIN_TILES = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys per step of the loop, warps per program and depth of the load pipeline."""

    keys: int
    warps: int
    stages: int


def packed_rows(seq_q: int, group: int) -> int:
    """Return the rows of a tile of queries: all heads of a group, at least what tl.dot needs."""
    return max(MIN_ROWS, 1 << (seq_q * group - 1).bit_length())


def choose_tile(head_dim: int, cache_bytes: int) -> Tile:
    """Return the tile for `cache_bytes` per cached element.

    Pages of a multiple of it hold whole tiles, one page number per tile; smaller ones are gathered key
    by key. That costs less than smaller tiles: over pages of 64 keys an fp8 cache of 32 x 8,192 tokens with
    a scale for each takes 159 us by tiles of 128 keys and 216 by tiles of 64 (H200).
    """
    keys = 64 if cache_bytes > 1 else 128
    if head_dim > 128:
        keys //= 2
    if cache_bytes == 4:
        keys = 32
    return Tile(keys=keys, warps=4, stages=3 if cache_bytes < 4 else 2)


def is_even(head_dim: int, layouts: Sequence[tuple[int, ...]]) -> bool:
    """Say whether a one-byte cache can be read by 16-bit words, as the fast loads want it.

    `layouts` hold the storage offset and the strides but the last of k and of v.
    """
    return head_dim % 2 == 0 and all(number % 2 == 0 for layout in layouts for number in layout)


def choose_splits(rows: int, kv_heads: int, seq: int, keys: int, multiprocessors: int) -> int:
    """Return how many programs share the keys of one key-value head of one row.

    The smallest count whose waves are at least 85 % as full as the best count's (the rule of
    FlashAttention-3's hopper/heuristics.h), with at least four tiles each and at most 128 splits.
    `seq` is the longest row's length.
    """
    programs = rows * kv_heads
    tiles = -(-seq // keys)
    most = min(max(tiles // MIN_TILES, 1), MAX_SPLITS)
    slots = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    if programs == 0 or most == 1:
        return 1

    def fullness(splits: int) -> float:
        waves = programs * splits / slots
        return waves / -(-programs * splits // slots)

    counts = range(1, most + 1)
    best = max(map(fullness, counts))
    return next(count for count in counts if fullness(count) >= GOOD_ENOUGH * best)
