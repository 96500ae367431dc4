"""PyTorch's caching allocator, replayed: which blocks tensors get and what segments that takes.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), default settings: requests are rounded to
512 B; up to 1 MiB they come from 2 MiB segments, below 10 MiB from 20 MiB segments, and from 10 MiB
on from segments of their own in steps of 2 MiB. A request takes the smallest free block of its
stream and pool that holds it. A block is split when 512 B (small pool) or more than 1 MiB (large
pool) would be left; otherwise the whole block counts as allocated. Freed neighbours merge.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from planner.units import MIB_BYTES

ROUNDING_BYTES = 512
SMALL_REQUEST_BYTES = MIB_BYTES
SMALL_SEGMENT_BYTES = 2 * MIB_BYTES
LARGE_REQUEST_BYTES = 10 * MIB_BYTES
LARGE_SEGMENT_BYTES = 20 * MIB_BYTES
SEGMENT_STEP_BYTES = 2 * MIB_BYTES
# Keeps segments apart, so that blocks of two segments are never neighbours.
_GAP_BYTES = 1 << 60


class _Block:
    __slots__ = ("address", "following", "is_free", "pool", "preceding", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: list[tuple[int, int]]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.is_free = False
        self.preceding: _Block | None = None
        self.following: _Block | None = None


class CachingAllocator:
    """Counts allocated and reserved bytes, and their peaks, as torch's allocator does."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._pools: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self._free: dict[int, _Block] = {}
        self._next_address = 0

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        self.peak_allocated_bytes = self.allocated_bytes

    def allocate(self, size_bytes: int, stream: int = 0) -> _Block:
        """Give a block of at least `size_bytes` (positive) on `stream`."""
        size = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
        is_small = size <= SMALL_REQUEST_BYTES
        pool = self._pools.setdefault((stream, is_small), [])
        index = bisect_left(pool, (size, -1))
        if index < len(pool):
            block = self._free.pop(pool.pop(index)[1])
            block.is_free = False
        else:
            block = self._new_segment(size, is_small, pool)
        left = block.size_bytes - size
        if left > SMALL_REQUEST_BYTES or (is_small and left >= ROUNDING_BYTES):
            self._split(block, size)
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def release(self, block: _Block) -> None:
        """Take a block back and merge it with free neighbours."""
        self.allocated_bytes -= block.size_bytes
        before, after = block.preceding, block.following
        if after is not None and after.is_free:
            self._take(after)
            self._join(block, after)
        if before is not None and before.is_free:
            self._take(before)
            self._join(before, block)
            block = before
        self._give(block)

    def _new_segment(self, size: int, is_small: bool, pool: list[tuple[int, int]]) -> _Block:
        if is_small:
            segment = SMALL_SEGMENT_BYTES
        elif size < LARGE_REQUEST_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        self.reserved_bytes += segment
        self._next_address += _GAP_BYTES
        return _Block(self._next_address, segment, pool)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size_bytes - size, block.pool)
        rest.preceding, rest.following = block, block.following
        if block.following is not None:
            block.following.preceding = rest
        block.following, block.size_bytes = rest, size
        self._give(rest)

    def _give(self, block: _Block) -> None:
        block.is_free = True
        self._free[block.address] = block
        insort(block.pool, (block.size_bytes, block.address))

    def _take(self, block: _Block) -> None:
        block.is_free = False
        del self._free[block.address]
        del block.pool[bisect_left(block.pool, (block.size_bytes, block.address))]

    @staticmethod
    def _join(block: _Block, after: _Block) -> None:
        block.size_bytes += after.size_bytes
        block.following = after.following
        if after.following is not None:
            after.following.preceding = block
