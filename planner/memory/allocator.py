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
from collections.abc import Iterable
from typing import Any

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


class Block:
    """Consecutive bytes of a segment, with a tensor or free; `pool` holds it while it is free."""

    __slots__ = ("address", "following", "is_free", "pool", "preceding", "size_bytes")

    def __init__(self, address: int, size_bytes: int, pool: Any) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.pool = pool
        self.is_free = False
        self.preceding: Block | None = None
        self.following: Block | None = None


class _Pool:
    """Free blocks by size: of each size the addresses, lowest first.

    A size without a block stays listed, for steps ask for the same sizes again and again; a search
    that comes across it drops it.
    """

    __slots__ = ("addresses_of", "block_at", "sizes")

    def __init__(self) -> None:
        self.addresses_of: dict[int, list[int]] = {}
        self.sizes: list[int] = []
        self.block_at: dict[int, Block] = {}

    def give(self, block: Block) -> None:
        """Add a block, and mark it as free."""
        block.is_free = True
        self.block_at[block.address] = block
        addresses = self.addresses_of.get(block.size_bytes)
        if addresses is None:
            self.addresses_of[block.size_bytes] = [block.address]
            insort(self.sizes, block.size_bytes)
        else:
            insort(addresses, block.address)

    def take(self, block: Block) -> None:
        """Remove a block, and mark it as not free."""
        block.is_free = False
        addresses = self.addresses_of[block.size_bytes]
        del addresses[bisect_left(addresses, block.address)]

    def take_best(self, size: int) -> Block | None:
        """Remove the smallest block of at least `size` bytes, of equal ones the lowest."""
        sizes, index = self.sizes, bisect_left(self.sizes, size)
        while index < len(sizes):
            addresses = self.addresses_of[sizes[index]]
            if addresses:
                block = self.block_at[addresses.pop(0)]
                block.is_free = False
                return block
            del self.addresses_of[sizes.pop(index)]
        return None

    def blocks(self) -> list[Block]:
        """All blocks, the smallest first, then the lowest."""
        return [self.block_at[a] for size in self.sizes for a in self.addresses_of[size]]


class CachingAllocator:
    """Counts allocated and reserved bytes, and their peaks, as torch's allocator does."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._capacity_bytes = capacity_bytes
        self._small_pools: dict[int, _Pool] = {0: _Pool()}
        self._large_pools: dict[int, _Pool] = {0: _Pool()}
        self._next_address = _TOP_ADDRESS
        self._chunk_ends: list[tuple[int, int]] = []
        self._largest_end = 0

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        self.peak_allocated_bytes = self.allocated_bytes

    def empty_cache(self) -> None:
        """Give back all free segments, as `torch.cuda.empty_cache` does, and forget their peak.

        Engines call it before the first step; what they reserved till then a step has no part in.
        """
        self._give_back_segments()
        self.peak_reserved_bytes = self.reserved_bytes

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Give a block of at least `size_bytes` (positive) on `stream`."""
        size = rounded(size_bytes)
        pools = self._small_pools if size <= SMALL_REQUEST_BYTES else self._large_pools
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = _Pool()
        block = self._fit(size, pool)
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def release(self, block: Block) -> None:
        """Take a block back and merge it with free neighbours."""
        self.allocated_bytes -= block.size_bytes
        merge(block)

    def serve(self, slots: Iterable[int], sizes: Iterable[int], blocks: list[Any]) -> None:
        """Serve requests of the default stream in order, each for one slot of `blocks`.

        A positive size, of whole ROUNDING_BYTES, allocates; a negative one releases what the slot
        holds, if anything; 0 does nothing. Written out, for a step has thousands of requests: most
        find a free block of their very size, and leave one without free neighbours.
        """
        small, large = self._small_pools[0], self._large_pools[0]
        allocated, peak = self.allocated_bytes, self.peak_allocated_bytes
        for slot, size in zip(slots, sizes, strict=True):
            if size > 0:
                pool = small if size <= SMALL_REQUEST_BYTES else large
                addresses = pool.addresses_of.get(size)
                if addresses:
                    block = pool.block_at[addresses.pop(0)]
                    block.is_free = False
                else:
                    block = self._fit(size, pool)
                blocks[slot] = block
                allocated += block.size_bytes
                if allocated > peak:
                    peak = allocated
            elif size and (block := blocks[slot]) is not None:
                blocks[slot] = None
                allocated -= block.size_bytes
                before, after = block.preceding, block.following
                if (before and before.is_free) or (after and after.is_free):
                    merge(block)
                elif (addresses := block.pool.addresses_of.get(block.size_bytes)) is None:
                    block.pool.give(block)
                else:
                    block.is_free = True
                    insort(addresses, block.address)
        self.allocated_bytes, self.peak_allocated_bytes = allocated, peak

    def state(self) -> Any:
        """What decides how the same requests are served again: equal states serve them equally.

        Segments are the same where as many bytes are reserved and none was given back.
        """
        pools = (self._small_pools, self._large_pools)
        free = [
            (stream, [(b.size_bytes, b.address) for b in pool.blocks()])
            for of_stream in pools
            for stream, pool in of_stream.items()
        ]
        return self.reserved_bytes, self.allocated_bytes, self.num_retries, free

    def _fit(self, size: int, pool: _Pool) -> Block:
        """The best block for a rounded size, split where enough would be left."""
        is_small = size <= SMALL_REQUEST_BYTES
        block = pool.take_best(size) or self._new_segment(size, is_small, pool)
        left = block.size_bytes - size
        if left > SMALL_REQUEST_BYTES or (is_small and left >= ROUNDING_BYTES):
            split(block, size)
        return block

    def _new_segment(self, size: int, is_small: bool, pool: _Pool) -> Block:
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
        block = Block(self._place(segment), segment, pool)
        pool.block_at[block.address] = block
        return block

    def _has_room(self, segment: int) -> bool:
        return self._capacity_bytes is None or self.reserved_bytes + segment <= self._capacity_bytes

    def _give_back_segments(self) -> None:
        for pool in (*self._small_pools.values(), *self._large_pools.values()):
            for block in pool.blocks():
                if block.preceding is None and block.following is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size_bytes
                    insort(self._chunk_ends, (block.address, block.size_bytes))
                    self._largest_end = max(self._largest_end, block.size_bytes)

    def _place(self, segment: int) -> int:
        """The address of a new segment."""
        if segment > self._largest_end:
            return self._place_in_chunk(segment)
        for index, (address, size) in enumerate(self._chunk_ends):
            if size >= segment:
                self._chunk_ends[index : index + 1] = (
                    [(address + segment, size - segment)] if size > segment else []
                )
                return address
        # Only now is the bound worth its price: ends are many, and most segments larger than all.
        self._largest_end = max((size for _, size in self._chunk_ends), default=0)
        return self._place_in_chunk(segment)

    def _place_in_chunk(self, segment: int) -> int:
        """The address of a segment that begins a chunk of its own."""
        chunk = -(-segment // _CHUNK_BYTES) * _CHUNK_BYTES
        self._next_address -= chunk
        if chunk > segment:
            self._largest_end = max(self._largest_end, chunk - segment)
            self._chunk_ends.insert(0, (self._next_address + segment, chunk - segment))
        return self._next_address


def rounded(size_bytes: int) -> int:
    """The size of the block that a tensor of `size_bytes` asks for."""
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def split(block: Block, size: int) -> None:
    """Cut a block to `size` bytes; the rest is free."""
    rest = Block(block.address + size, block.size_bytes - size, block.pool)
    rest.preceding, rest.following = block, block.following
    if block.following is not None:
        block.following.preceding = rest
    block.following, block.size_bytes = rest, size
    block.pool.give(rest)


def merge(block: Block) -> None:
    """Make a block free, as one with its free neighbours."""
    before, after, pool = block.preceding, block.following, block.pool
    if after is not None and after.is_free:
        pool.take(after)
        join(block, after)
    if before is not None and before.is_free:
        pool.take(before)
        join(before, block)
        block = before
    pool.give(block)


def join(block: Block, after: Block) -> None:
    """Add to a block the one that follows it."""
    block.size_bytes += after.size_bytes
    block.following = after.following
    if after.following is not None:
        after.following.preceding = block
