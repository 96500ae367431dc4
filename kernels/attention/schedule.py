"""Who computes which tile in the Hopper forward, and which keys it visits. Pure, no GPU.

A row tile is `groups` x GROUP_ROWS query rows of one head. Kernels walk lists of tiles made here:
under a causal mask late tiles see more keys than early ones, so tiles are dealt out longest first,
each to the worker that is free first, and heads are taken in sections whose keys and values fit the
L2 cache together. Windows, and large heads without a mask, need no list.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

GROUP_ROWS = 64
BLOCK_KEYS = 128
BACKWARD_KEYS = 128
# Half of an H100's or H200's L2 cache, which holds 50 MB: outputs and queries pass through it too.
SECTION_BYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class ForwardTile:
    """Columns (head size rounded up), warp groups of 64 query rows, registers of their threads.

    `stages` is how many key blocks and value blocks the rings hold.
    """

    columns: int
    groups: int
    registers: int
    stages: int = 2

    @property
    def rows(self) -> int:
        """Query rows of one tile."""
        return self.groups * GROUP_ROWS

    @property
    def keys(self) -> int:
        """Keys of one block."""
        return BLOCK_KEYS

    @property
    def key_columns(self) -> int:
        """Columns of queries and keys."""
        return self.columns


# Compiled without spills and with asynchronous products by Triton 3.6 and 3.7
# (tests/kernels/attention/test_hopper_compiled.py).
FORWARD_TILES = {64: ForwardTile(64, 3, 160), 128: ForwardTile(128, 2, 240)}
MAX_HEAD_DIM = max(FORWARD_TILES)


def forward_tile(head_dim: int) -> ForwardTile:
    """Return the tile for a head size of at most MAX_HEAD_DIM; columns beyond it are read as zero."""
    return FORWARD_TILES[64 if head_dim <= 64 else 128]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """One attention call as the schedule sees it; `heads` counts those of the whole batch.

    `group` is the number of query heads that share a key/value head; `section_bytes` bounds the
    keys and values of the heads that are dealt out together. A query sees `right` keys after its
    own, 0 under a causal mask, None for all.
    """

    seq_q: int
    seq_k: int
    heads: int
    group: int
    tile: ForwardTile | SingleTile
    right: int | None
    section_bytes: int = SECTION_BYTES

    def dealt(self) -> ForwardWork:
        """Return the work that stands for all whose tiles are dealt out as this one's.

        Where every tile visits as many blocks, their number does not matter: a growing cache needs
        no new list.
        """
        return replace(self, seq_k=1) if self.right is None else self

    @property
    def row_tiles(self) -> int:
        """Row tiles of one head."""
        return -(-self.seq_q // self.tile.rows)

    def visible_blocks(self, row_tile: int) -> int:
        """Return the key blocks that a tile visits: what its last row sees, and at least one."""
        end = self.seq_k
        if self.right is not None:
            last_row = (row_tile + 1) * self.tile.rows
            end = min(end, last_row + self.seq_k - self.seq_q + self.right)
        return max(1, -(-end // self.tile.keys))

    @property
    def section_heads(self) -> int:
        """Heads that are dealt out together: all tiles of equal length head by head, else by L2."""
        if self.right is None:
            return 1
        # Keys and values of one head, two bytes an element.
        head_bytes = 2 * self.seq_k * (self.tile.key_columns + self.tile.columns)
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

    Without causality only keys past the end are hidden, in the last block, which is visited first.
    A causal group of 64 rows meets its diagonal in one block if the diagonal starts at a multiple
    of 64; and if there are fewer keys than queries, some rows see no key at all.
    """
    if work.right is None:
        return Masking.FIRST_BLOCK if work.seq_k % BLOCK_KEYS else Masking.NONE
    offset = work.seq_k - work.seq_q
    aligned = offset >= 0 and offset % GROUP_ROWS == 0
    return Masking.FIRST_BLOCK if aligned else Masking.EVERY_BLOCK


@dataclass(frozen=True, slots=True)
class SingleTile:
    """Form of the kernel for windows, large and unequal heads.

    `columns` of values and outputs, and `extra` more of queries and keys; warp groups of 64 query
    rows, registers of their threads, keys of a block, and blocks of keys and of values in the rings.
    """

    columns: int
    groups: int
    registers: int
    keys: int = BLOCK_KEYS
    extra: int = 0
    stages: int = 2

    @property
    def rows(self) -> int:
        """Query rows of one tile."""
        return self.groups * GROUP_ROWS

    @property
    def key_columns(self) -> int:
        """Columns of queries and keys."""
        return self.columns + self.extra

    @property
    def has_own_out(self) -> bool:
        """Whether shared memory has room for the output beside the queries, whose place it takes else."""
        return self.columns <= 128 and not self.extra


# By the largest head size of queries and keys, and of values; checked like FORWARD_TILES.
SINGLE_TILES = {
    (64, 64): SingleTile(64, 3, 160, stages=3),
    (128, 128): SingleTile(128, 2, 240),
    (192, 128): SingleTile(128, 2, 240, extra=64),
    (256, 256): SingleTile(256, 2, 240, keys=64),
}


def single_tile(head_dim: int, value_head_dim: int) -> SingleTile:
    """Return the tile for head sizes of at most 256; columns beyond the heads are read as zero."""
    return next(
        tile
        for (most, most_values), tile in SINGLE_TILES.items()
        if head_dim <= most and value_head_dim <= most_values
    )


def bounded(
    seq_q: int, seq_k: int, left: int | None, right: int | None
) -> tuple[int | None, int | None]:
    """Return `left` and `right`, None for one that hides no key from any query.

    Query i stands at key i + seq_k - seq_q and sees `left` keys before that and `right` after it.
    """
    hides_left = left is not None and left < seq_k - 1
    hides_right = right is not None and right < seq_q - 1
    return left if hides_left else None, right if hides_right else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleWork:
    """The blocks that a tile visits: query i stands at key i + seq_k - seq_q.

    It sees `left` keys before that and `right` after it, None for all (causal is a right of 0).
    """

    seq_q: int
    seq_k: int
    left: int | None
    right: int | None
    tile: SingleTile

    def bounded(self) -> SingleWork:
        """Return this work without a bound that hides no key from any query."""
        left, right = bounded(self.seq_q, self.seq_k, self.left, self.right)
        return replace(self, left=left, right=right)

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

    @property
    def is_listed(self) -> bool:
        """Whether workers walk a list of tiles, which pays where these are not alike: see ForwardWork.

        Without one a worker takes every n-th tile, of as many as there are workers.
        """
        return self.right is not None and self.left is None

    def seen_blocks(self, first_row: int, end_row: int) -> range:
        """Return the key blocks that a run of rows visits: at least one, masked if none is seen."""
        keys = self.tile.keys
        end = self.seq_k if self.right is None else min(self.seq_k, end_row + self.upper)
        end_block = max(1, -(-end // keys))
        if self.left is None:
            return range(end_block)
        return range(min(max(first_row + self.lower, 0) // keys, end_block - 1), end_block)

    def whole_blocks(self, row: int) -> range:
        """Return those blocks of a group of GROUP_ROWS rows that are not masked: all is seen."""
        keys, end_row = self.tile.keys, row + GROUP_ROWS
        seen = self.seen_blocks(row, end_row)
        stop = self.seq_k
        if self.right is not None:
            stop = min(stop, max(row + self.upper + 1, 0))
        whole_end = max(min(stop // keys, seen.stop), seen.start)
        start = seen.start
        if self.left is not None:
            start = max(start, -(-max(end_row - 1 + self.lower, 0) // keys))
        return range(min(start, whole_end), whole_end)


def is_persistent(head_dim: int, value_head_dim: int, left: int | None, right: int | None) -> bool:
    """Say whether the persistent kernel takes a call: full or causal, like heads up to 128."""
    return head_dim == value_head_dim <= MAX_HEAD_DIM and left is None and right in (None, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWork:
    """The query tiles that a backward's program walks, which owns BACKWARD_KEYS keys.

    `left` and `right` as in SingleWork, after `bounded`.
    """

    seq_q: int
    seq_k: int
    left: int | None
    right: int | None
    queries: int

    @property
    def upper(self) -> int:
        """What to add to a query for the last key it sees; read with a right bound only."""
        return self.seq_k - self.seq_q + (self.right or 0)

    @property
    def lower(self) -> int:
        """What to add to a query for the first key it sees; read with a left bound only."""
        return self.seq_k - self.seq_q - (self.left or 0)

    def seen_tiles(self, first_key: int) -> range:
        """Return the first queries of the tiles that see one of the program's keys."""
        rows, end_key = self.queries, min(first_key + BACKWARD_KEYS, self.seq_k)
        start = 0 if self.right is None else max(first_key - self.upper, 0) // rows * rows
        end = self.seq_q if self.left is None else min(self.seq_q, max(end_key - self.lower, 0))
        return range(start, max(-(-end // rows) * rows, start), rows)

    def whole_tiles(self, first_key: int) -> range:
        """Return those of them that are not masked: each query sees every key of the program."""
        rows, seen, end_key = self.queries, self.seen_tiles(first_key), first_key + BACKWARD_KEYS
        if end_key > self.seq_k:
            return range(seen.stop, seen.stop, rows)
        first = 0 if self.right is None else max(end_key - 1 - self.upper, 0)
        end = seen.stop if self.left is None else max(first_key - self.lower + 1, 0) // rows * rows
        start = min(max(-(-first // rows) * rows, seen.start), seen.stop)
        return range(start, max(min(end, seen.stop), start), rows)
