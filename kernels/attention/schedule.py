"""Who computes which tile: the lists that the persistent Hopper kernel walks. Pure, no GPU.

A row tile is `groups` x GROUP_ROWS query rows of one head. Under a causal mask late tiles see more
keys than early ones, so tiles are dealt out longest first, each to the worker that is free first.
Heads are taken in sections whose keys and values fit the L2 cache together.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

GROUP_ROWS = 64
# Half of an H100's or H200's L2 cache, which holds 50 MB: outputs and queries pass through it too.
SECTION_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """Columns (head size rounded up), warp groups of 64 query rows, registers of their threads.

    `keys` in one block; `stages` is how many key blocks and value blocks the rings hold, and
    `query_slots` how many query tiles of a group: with one, the output has no buffer either.
    """

    columns: int
    groups: int
    registers: int
    keys: int = 128
    stages: int = 2
    query_slots: int = 2

    @property
    def rows(self) -> int:
        """Query rows of one tile."""
        return self.groups * GROUP_ROWS


# Compiled without spills and with asynchronous products by Triton 3.6 and 3.7
# (tests/kernels/attention/test_hopper_compiled.py).
FORWARD_TILES = {
    64: ForwardTile(64, 3, 160),
    128: ForwardTile(128, 2, 240),
    256: ForwardTile(256, 2, 240, keys=64, query_slots=1),
}


def forward_tile(head_dim: int) -> ForwardTile:
    """Return the tile for a head size of at most 256; columns beyond the head are read as zero."""
    return next(tile for columns, tile in FORWARD_TILES.items() if head_dim <= columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """One attention call as the schedule sees it; `heads` counts those of the whole batch.

    `group` is the number of query heads that share a key/value head. Query i stands at key
    i + seq_k - seq_q and sees `left` keys before that and `right` after it, None for all (causal is
    a right of 0); `bounded` leaves bounds out that hide nothing. `section_bytes` bounds the keys and
    values of the heads that are dealt out together.
    """

    seq_q: int
    seq_k: int
    heads: int
    group: int
    tile: ForwardTile
    left: int | None = None
    right: int | None = None
    section_bytes: int = SECTION_BYTES

    def bounded(self) -> ForwardWork:
        """Return this work without a bound that hides no key from any query."""
        hides_left = self.left is not None and self.left < self.seq_k - 1
        hides_right = self.right is not None and self.right < self.seq_q - 1
        return replace(
            self,
            left=self.left if hides_left else None,
            right=self.right if hides_right else None,
        )

    def dealt(self) -> ForwardWork:
        """Return the work that stands for all whose tiles are dealt out as this one's.

        Where every tile visits as many blocks, their number does not matter: a growing cache needs
        no new list.
        """
        if self.row_tiles > 1 and (self.left is not None or self.right is not None):
            return self
        return replace(self, seq_k=1, left=None, right=None)

    @property
    def upper(self) -> int:
        """What to add to a query for the last key it sees; read with a right bound only."""
        return self.seq_k - self.seq_q + (self.right or 0)

    @property
    def lower(self) -> int:
        """What to add to a query for the first key it sees; read with a left bound only."""
        return self.seq_k - self.seq_q - (self.left or 0)

    @property
    def row_tiles(self) -> int:
        """Row tiles of one head."""
        return -(-self.seq_q // self.tile.rows)

    def visible_blocks(self, row_tile: int) -> int:
        """Return the key blocks that a tile visits: those that a row of it sees, and at least one."""
        first_row = row_tile * self.tile.rows
        end = self.seq_k
        if self.right is not None:
            end = min(end, first_row + self.tile.rows + self.upper)
        end_block = max(1, -(-end // self.tile.keys))
        if self.left is None:
            return end_block
        return end_block - min(max(first_row + self.lower, 0) // self.tile.keys, end_block - 1)

    @property
    def section_heads(self) -> int:
        """Heads that are dealt out together: all tiles of equal length head by head, else by L2."""
        if self.right is None:
            return 1
        # Keys and values of one head, two bytes an element.
        head_bytes = 2 * 2 * self.seq_k * self.tile.columns
        return max(1, self.section_bytes // head_bytes) * self.group


@lru_cache(maxsize=64)
def forward_lists(work: ForwardWork, workers: int) -> tuple[tuple[int, ...], ...]:
    """Return each worker's tiles in order; tile = head * work.row_tiles + row tile.

    Greedy, longest first within a section; a tile takes one step per key block and one more. No
    worker is without a tile: there are at most as many workers as tiles.
    """
    workers = min(workers, work.heads * work.row_tiles)
    free = [(0, worker) for worker in range(workers)]
    lists: list[list[int]] = [[] for _ in range(workers)]
    steps = [1 + work.visible_blocks(row_tile) for row_tile in range(work.row_tiles)]
    for first in range(0, work.heads, work.section_heads):
        section = range(first, min(first + work.section_heads, work.heads))
        for row_tile in reversed(range(work.row_tiles)):
            for head in section:
                time, worker = heapq.heappop(free)
                lists[worker].append(head * work.row_tiles + row_tile)
                heapq.heappush(free, (time + steps[row_tile], worker))
    return tuple(map(tuple, lists))


def forward_table(work: ForwardWork, workers: int) -> list[int]:
    """Return the lists as the kernel reads them: where each begins and the last ends, then all tiles.

    1 + workers + tiles numbers; a worker's list begins that many tiles after the first tile.
    """
    lists = forward_lists(work, workers)
    starts = itertools.accumulate(map(len, lists), initial=0)
    return [*starts, *itertools.chain.from_iterable(lists)]


class Masking:
    """How much of a tile's keys the kernel masks: compile-time values of `MASK`."""

    NONE = 0
    FIRST_BLOCK = 1
    EVERY_BLOCK = 2


def forward_masking(work: ForwardWork) -> int:
    """Return the least masking that is right for `work`.

    Without bounds only keys past the end are hidden, in the last block, which is visited first. A
    causal group of 64 rows meets its diagonal in one block if the diagonal starts at a multiple of
    64; and if there are fewer keys than queries, some rows see no key at all.
    """
    if work.left is None and work.right is None:
        return Masking.FIRST_BLOCK if work.seq_k % work.tile.keys else Masking.NONE
    aligned = work.upper >= 0 and work.upper % GROUP_ROWS == 0
    is_causal = work.left is None and work.right == 0
    if work.tile.query_slots == 1:
        # The form that asks each block whether to mask it spills nothing, the other 36 bytes.
        return Masking.EVERY_BLOCK
    return Masking.FIRST_BLOCK if is_causal and aligned else Masking.EVERY_BLOCK
