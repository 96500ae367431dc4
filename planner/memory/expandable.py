"""PyTorch's caching allocator with `expandable_segments:True`, replayed.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.11): the blocks of one stream and pool live in
one range of addresses that grows. Memory is mapped into it in granules (2 MiB in the small pool,
20 MiB in the large one) and reserved bytes are what is mapped. Requests are rounded to 512 B, and
what is left of a block is always split off. A free block at the end of what is mapped counts, for
the best fit, with all the addresses that it can grow into, so a hole between tensors goes first.
Nothing is unmapped until the memory is short: then every whole granule without a tensor is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from planner.memory.allocator import (
    LARGE_SEGMENT_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    ReplayedOutOfMemoryError,
    join,
    rounded,
    split,
)

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

    def serve(self, slots: Iterable[int], sizes: Iterable[int], blocks: list[Any]) -> None:
        """Serve requests of the default stream in order; see `CachingAllocator.serve`."""
        for slot, size in zip(slots, sizes, strict=True):
            if size > 0:
                blocks[slot] = self.allocate(size)
            elif size and blocks[slot] is not None:
                self.release(blocks[slot])
                blocks[slot] = None

    def state(self) -> Any:
        """What decides how the same requests are served again; see `CachingAllocator.state`."""
        ranges = [
            (
                [entry[:2] for entry in place.free],
                sorted((h.address, h.size_bytes) for h in place.holes.values()),
            )
            for place in self._ranges.values()
        ]
        return self.reserved_bytes, self.allocated_bytes, self.num_retries, ranges

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
