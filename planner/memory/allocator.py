"""PyTorch's caching allocator, replayed: which blocks tensors get and what segments that takes.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), default settings: requests are rounded to
512 B; up to 1 MiB they come from 2 MiB segments, below 10 MiB from 20 MiB segments, and from 10 MiB
on from segments of their own in steps of 2 MiB. A request takes the smallest free block of its
stream and pool that holds it. A block is split when 512 B (small pool) or more than 1 MiB (large
pool) would be left; otherwise the whole block counts as allocated. Freed neighbours merge. Where
the driver has no room for a segment, all segments without a tensor are given back and it is asked
again.

Of free blocks of one size the one at the lowest address is taken, so addresses matter. The driver
gives them from the top down in chunks of 32 MiB, and lets a segment that fits into the end of a
chunk have it, the lowest such end first (read from allocator snapshots on an H200, driver 580).
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
_CHUNK_BYTES = 32 * MIB_BYTES
_TOP_ADDRESS = 1 << 47


class ReplayedOutOfMemoryError(Exception):
    """A segment that the capacity has no room for, even with all cached segments given back."""


# Free blocks of one stream and pool: size, address, block; smallest first, then lowest.
FreeBlocks = list[tuple[int, int, "Block"]]


class Block:
    """Consecutive bytes of a segment, with a tensor or free."""

    __slots__ = ("address", "following", "is_free", "pool", "preceding", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: FreeBlocks) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.is_free = False
        self.preceding: Block | None = None
        self.following: Block | None = None


class CachingAllocator:
    """Counts allocated and reserved bytes, and their peaks, as torch's allocator does."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._capacity_bytes = capacity_bytes
        self._small_pools: dict[int, FreeBlocks] = {}
        self._large_pools: dict[int, FreeBlocks] = {}
        self._next_address = _TOP_ADDRESS
        self._chunk_ends: list[tuple[int, int]] = []

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        self.peak_allocated_bytes = self.allocated_bytes

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Give a block of at least `size_bytes` (positive) on `stream`.

        Written out, for a step asks thousands of times.
        """
        size = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
        is_small = size <= SMALL_REQUEST_BYTES
        pools = self._small_pools if is_small else self._large_pools
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = []
        index = bisect_left(pool, (size,))
        if index < len(pool):
            block = pool.pop(index)[2]
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

    def release(self, block: Block) -> None:
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

    def _new_segment(self, size: int, is_small: bool, pool: FreeBlocks) -> Block:
        if is_small:
            segment = SMALL_SEGMENT_BYTES
        elif size < LARGE_REQUEST_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        if not self._has_room(segment):
            self._give_back_segments()
            self.num_retries += 1
            if not self._has_room(segment):
                raise ReplayedOutOfMemoryError
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return Block(self._place(segment), segment, pool)

    def _has_room(self, segment: int) -> bool:
        return self._capacity_bytes is None or self.reserved_bytes + segment <= self._capacity_bytes

    def _give_back_segments(self) -> None:
        pools = (*self._small_pools.values(), *self._large_pools.values())
        for block in [entry[2] for pool in pools for entry in pool]:
            if block.preceding is None and block.following is None:
                self._take(block)
                self.reserved_bytes -= block.size_bytes
                insort(self._chunk_ends, (block.address, block.size_bytes))

    def _place(self, segment: int) -> int:
        """The address of a new segment."""
        for index, (address, size) in enumerate(self._chunk_ends):
            if size >= segment:
                self._chunk_ends[index : index + 1] = (
                    [(address + segment, size - segment)] if size > segment else []
                )
                return address
        chunk = -(-segment // _CHUNK_BYTES) * _CHUNK_BYTES
        self._next_address -= chunk
        if chunk > segment:
            self._chunk_ends.insert(0, (self._next_address + segment, chunk - segment))
        return self._next_address

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size_bytes - size, block.pool)
        rest.preceding, rest.following = block, block.following
        if block.following is not None:
            block.following.preceding = rest
        block.following, block.size_bytes = rest, size
        self._give(rest)

    def _give(self, block: Block) -> None:
        block.is_free = True
        insort(block.pool, (block.size_bytes, block.address, block))

    def _take(self, block: Block) -> None:
        block.is_free = False
        pool = block.pool
        del pool[bisect_left(pool, (block.size_bytes, block.address))]

    @staticmethod
    def _join(block: Block, after: Block) -> None:
        block.size_bytes += after.size_bytes
        block.following = after.following
        if after.following is not None:
            after.following.preceding = block
