"""A second account of torch's caching allocator, with objects for blocks, to test the planner's by.

The rules are those that `planner.memory.allocator` and `planner.memory.expandable` name; here every
block is an object with its neighbours, and free blocks are sorted lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from planner.memory.recorder import ReplayedOutOfMemoryError
from planner.units import MIB_BYTES

ROUNDING_BYTES = 512
SMALL_REQUEST_BYTES = MIB_BYTES
SMALL_SEGMENT_BYTES = 2 * MIB_BYTES
LARGE_REQUEST_BYTES = 10 * MIB_BYTES
LARGE_SEGMENT_BYTES = 20 * MIB_BYTES
SEGMENT_STEP_BYTES = 2 * MIB_BYTES
_CHUNK_BYTES = 32 * MIB_BYTES
_TOP_ADDRESS = 1 << 47


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


# More addresses than any plan maps, in whole granules of either pool; ranges never touch.
_RANGE_BYTES = LARGE_SEGMENT_BYTES << 30


class _Hole(Block):
    """Addresses without memory; never free, so that free neighbours do not merge with it."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class _Range:
    """The blocks of one stream and pool: free ones by size, holes by address."""

    granule_bytes: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    holes: dict[int, _Hole] = field(default_factory=dict)

    def give(self, block: Block) -> None:
        """Add a block, and mark it as free."""
        block.is_free = True
        insort(self.free, (block.size_bytes, block.address, block))

    def take(self, block: Block) -> None:
        """Remove a block, and mark it as not free."""
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]


class ExpandableAllocator(CachingAllocator):
    """Counts allocated and reserved bytes, and their peaks, with segments that grow."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._ranges: dict[tuple[int, bool], _Range] = {}

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Give a block of `size_bytes` (positive), rounded to 512 B, on `stream`."""
        size = rounded(size_bytes)
        place = self._range(stream, size <= SMALL_REQUEST_BYTES)
        block = self._best_fit(place, size) or self._map(place, size)
        if block is None:
            self._give_back_segments()
            self.num_retries += 1
            block = self._map(place, size)
        if block is None:
            raise ReplayedOutOfMemoryError
        if block.size_bytes > size:
            split(block, size)
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _range(self, stream: int, is_small: bool) -> _Range:
        found = self._ranges.get((stream, is_small))
        if found is None:
            found = _Range(SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES)
            start = (len(self._ranges) + 1) * 2 * _RANGE_BYTES
            found.holes[start] = _Hole(start, _RANGE_BYTES, found)
            self._ranges[stream, is_small] = found
        return found

    def _best_fit(self, place: _Range, size: int) -> Block | None:
        free = place.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        while index + 1 < len(free) and _reach(free[index + 1][2]) < _reach(free[index][2]):
            index += 1
        block = free.pop(index)[2]
        block.is_free = False
        return block

    def _map(self, place: _Range, size: int) -> Block | None:
        """Map memory for a block at the lowest addresses that have room; None where it is short."""
        for address in sorted(place.holes):
            hole = place.holes[address]
            before = hole.preceding
            start = before if before is not None and before.is_free else hole
            if _room_from(start, size):
                return self._grow(place, start, size)
        return None

    def _grow(self, place: _Range, start: Block, size: int) -> Block | None:
        """Turn free blocks and holes from `start` on into one block of at least `size`."""
        block: Block | None = None
        if not isinstance(start, _Hole):
            place.take(start)
            block = start
        while block is None or block.size_bytes < size:
            hole = start if block is None else block.following
            assert isinstance(hole, _Hole), "free blocks do not touch"
            missing = size if block is None else size - block.size_bytes
            mapped = self._map_hole(place, hole, min(missing, hole.size_bytes))
            if mapped is None:
                if block is not None:
                    place.give(block)
                return None
            if block is not None:
                join(block, mapped)
                mapped = block
            block = _joined_with_next(mapped)
        return block

    def _map_hole(self, place: _Range, hole: _Hole, size: int) -> Block | None:
        """Map whole granules at the start of a hole; None where there is no memory for them."""
        granule = place.granule_bytes
        mapped_bytes = -(-size // granule) * granule
        if not self._has_room(mapped_bytes):
            return None
        self.reserved_bytes += mapped_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        del place.holes[hole.address]
        block = Block(hole.address, mapped_bytes, place)
        _link(hole.preceding, block)
        following: Block | None = hole.following
        if mapped_bytes < hole.size_bytes:
            rest = _Hole(hole.address + mapped_bytes, hole.size_bytes - mapped_bytes, place)
            place.holes[rest.address] = rest
            _link(rest, following)
            following = rest
        _link(block, following)
        return block

    def _give_back_segments(self) -> None:
        for place in self._ranges.values():
            for block in [entry[2] for entry in place.free]:
                self._unmap(place, block)

    def _unmap(self, place: _Range, block: Block) -> None:
        """Give back the whole granules inside a free block; what is left of it stays free."""
        granule, end = place.granule_bytes, block.address + block.size_bytes
        first, last = -(-block.address // granule) * granule, end // granule * granule
        if first >= last:
            return
        place.take(block)
        self.reserved_bytes -= last - first
        hole = _Hole(first, last - first, place)
        before, after = block.preceding, block.following
        pieces: list[Block] = [hole]
        if first > block.address:
            pieces.insert(0, Block(block.address, first - block.address, place))
        if end > last:
            pieces.append(Block(last, end - last, place))
        for left, right in zip((before, *pieces), (*pieces, after), strict=True):
            _link(left, right)
        for piece in pieces:
            if piece is not hole:
                place.give(piece)
        place.holes[hole.address] = hole
        _merge_holes(place, hole)


def _joined_with_next(block: Block) -> Block:
    following = block.following
    if following is not None and following.is_free:
        following.pool.take(following)
        join(block, following)
    return block


def _reach(block: Block) -> int:
    """How large a free block can become without moving."""
    following = block.following
    return block.size_bytes + (following.size_bytes if isinstance(following, _Hole) else 0)


def _link(left: Block | None, right: Block | None) -> None:
    if left is not None:
        left.following = right
    if right is not None:
        right.preceding = left


def _merge_holes(place: _Range, hole: _Hole) -> None:
    """Make one hole of a hole and those that touch it."""
    after = hole.following
    if isinstance(after, _Hole):
        del place.holes[after.address]
        hole.size_bytes += after.size_bytes
        _link(hole, after.following)
    before = hole.preceding
    if isinstance(before, _Hole):
        del place.holes[hole.address]
        before.size_bytes += hole.size_bytes
        _link(before, hole.following)


def _run(block: Block | None) -> Iterator[Block]:
    """The free blocks and holes from a block on, up to the next tensor."""
    while block is not None and (block.is_free or isinstance(block, _Hole)):
        yield block
        block = block.following


def _room_from(start: Block, size: int) -> bool:
    found = 0
    for block in _run(start):
        found += block.size_bytes
        if found >= size:
            return True
    return False
