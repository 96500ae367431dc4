"""PyTorch's caching allocator with `expandable_segments:True`, replayed.

Rules of c10/cuda/CUDACachingAllocator.cpp (torch 2.11): the blocks of one stream and pool live in
one range of addresses that grows. Memory is mapped into it in granules (2 MiB in the small pool,
20 MiB in the large one) and reserved bytes are what is mapped. Requests are rounded to 512 B, and
what is left of a block is always split off. A free block at the end of what is mapped counts, for
the best fit, with all the addresses that it can grow into, so a hole between tensors goes first.
Nothing is unmapped until the memory is short: then every whole granule without a tensor is.
"""

from __future__ import annotations

from planner.memory.blocks import (
    ABOVE,
    ADDRESS,
    AFTER,
    BEFORE,
    BELOW,
    BLOCK_WIDTH,
    FIRST_BLOCK,
    HOLE,
    LARGE_SEGMENT_BYTES,
    NOTHING,
    POOL,
    POOL_WIDTH,
    RESERVED,
    RETRIES,
    ROUNDING_BYTES,
    SIZE,
    SMALL_SEGMENT_BYTES,
    STATUS,
    TABLES_FULL,
    TENSOR,
    Heap,
    best,
    cut,
    give,
    has_room,
    has_rows,
    is_free,
    is_hole,
    join,
    new_block,
    position,
    reserve,
    take,
)

# More addresses than any plan maps, in whole granules of either pool; ranges never touch.
RANGE_BYTES = LARGE_SEGMENT_BYTES << 30


def fit_in_range(heap: Heap, size: int, pool: int) -> int:
    """A block for a rounded size, cut to it; NOTHING where there is no memory for one."""
    block = _best_in_range(heap, pool, size)
    if block < 0:
        block = _map(heap, pool, size)
    if block < 0:
        if not has_rows(heap, 3):
            heap.counts[STATUS] = TABLES_FULL
            return NOTHING
        unmap_all(heap)
        heap.counts[RETRIES] += 1
        block = _map(heap, pool, size)
        if block < 0:
            return NOTHING
    if heap.blocks[block * BLOCK_WIDTH + SIZE] > size:
        give(heap, cut(heap, block, size, TENSOR))
    return block


def _best_in_range(heap: Heap, pool: int, size: int) -> int:
    """The best free block of a range, taken; or NOTHING."""
    block = best(heap, pool, position(heap, pool, size))
    if block < 0:
        return NOTHING
    following = _next_free(heap, pool, block)
    while following >= 0 and _reach(heap, following) < _reach(heap, block):
        block = following
        following = _next_free(heap, pool, block)
    take(heap, block)
    return block


def _next_free(heap: Heap, pool: int, block: int) -> int:
    """The free block that follows another by size and address; or NOTHING."""
    row = block * BLOCK_WIDTH
    if heap.blocks[row + ABOVE] >= 0:
        return int(heap.blocks[row + ABOVE])
    larger = heap.blocks[row + SIZE] + ROUNDING_BYTES
    return best(heap, pool, position(heap, pool, larger))


def _reach(heap: Heap, block: int) -> int:
    """How large a free block can become without moving."""
    row = block * BLOCK_WIDTH
    after, size = heap.blocks[row + AFTER], heap.blocks[row + SIZE]
    if is_hole(heap, after):
        size += heap.blocks[after * BLOCK_WIDTH + SIZE]
    return int(size)


def _map(heap: Heap, pool: int, size: int) -> int:
    """Map memory for a block at the lowest addresses that have room; NOTHING where it is short."""
    blocks, place = heap.blocks, pool * POOL_WIDTH + FIRST_BLOCK
    if heap.pools[place] < 0:
        start = (pool + 1) * 2 * RANGE_BYTES
        heap.pools[place] = new_block(heap, start, RANGE_BYTES, pool, HOLE)
    block = heap.pools[place]
    while block >= 0:
        if is_hole(heap, block):
            before = blocks[block * BLOCK_WIDTH + BEFORE]
            begin = before if is_free(heap, before) else block
            if _room_from(heap, begin, size):
                return _grow(heap, begin, size)
        block = blocks[block * BLOCK_WIDTH + AFTER]
    return NOTHING


def _room_from(heap: Heap, block: int, size: int) -> bool:
    """Whether the free blocks and holes from a block on hold `size` bytes."""
    found = 0
    while found < size and (is_free(heap, block) or is_hole(heap, block)):
        found += heap.blocks[block * BLOCK_WIDTH + SIZE]
        block = heap.blocks[block * BLOCK_WIDTH + AFTER]
    return found >= size


def _grow(heap: Heap, begin: int, size: int) -> int:
    """Turn free blocks and holes from `begin` on into one block of at least `size` bytes."""
    blocks, block, hole, found = heap.blocks, NOTHING, begin, 0
    if not is_hole(heap, begin):
        take(heap, begin)
        block, hole = begin, blocks[begin * BLOCK_WIDTH + AFTER]
        found = blocks[begin * BLOCK_WIDTH + SIZE]
    while found < size:
        if not _map_hole(heap, hole, size - found):
            if block >= 0:
                give(heap, block)
            return NOTHING
        if block < 0:
            block = hole
        else:
            join(heap, block, hole)
        after = blocks[block * BLOCK_WIDTH + AFTER]
        if is_free(heap, after):
            take(heap, after)
            join(heap, block, after)
        hole = blocks[block * BLOCK_WIDTH + AFTER]
        found = blocks[block * BLOCK_WIDTH + SIZE]
    return block


def _map_hole(heap: Heap, hole: int, size: int) -> bool:
    """Map whole granules at the start of a hole, as many as it has; False without memory for them."""
    granule, hole_bytes = _granule_bytes(heap, hole), heap.blocks[hole * BLOCK_WIDTH + SIZE]
    mapped_bytes = -(-min(size, hole_bytes) // granule) * granule
    if not has_room(heap, mapped_bytes):
        return False
    reserve(heap, mapped_bytes)
    if mapped_bytes < hole_bytes:
        cut(heap, hole, mapped_bytes, HOLE)
    heap.blocks[hole * BLOCK_WIDTH + BELOW] = TENSOR
    return True


def _granule_bytes(heap: Heap, block: int) -> int:
    is_large = heap.blocks[block * BLOCK_WIDTH + POOL] % 2
    return LARGE_SEGMENT_BYTES if is_large else SMALL_SEGMENT_BYTES


def unmap_all(heap: Heap) -> None:
    """Give back every whole granule without a tensor."""
    for pool in range(len(heap.pools) // POOL_WIDTH):
        block = heap.pools[pool * POOL_WIDTH + FIRST_BLOCK]
        while block >= 0:
            if is_free(heap, block):
                block = _unmap(heap, block)
            block = heap.blocks[block * BLOCK_WIDTH + AFTER]


def _unmap(heap: Heap, block: int) -> int:
    """Give back the whole granules inside a free block; return the last block that is left of it."""
    blocks, row, granule = heap.blocks, block * BLOCK_WIDTH, _granule_bytes(heap, block)
    address = blocks[row + ADDRESS]
    end = address + blocks[row + SIZE]
    first, last = -(-address // granule) * granule, end // granule * granule
    if first >= last:
        return block
    take(heap, block)
    heap.counts[RESERVED] -= last - first
    hole = block
    if first > address:
        hole = cut(heap, block, first - address, HOLE)
        give(heap, block)
    blocks[hole * BLOCK_WIDTH + BELOW] = HOLE
    rest = NOTHING
    if end > last:
        rest = cut(heap, hole, last - first, TENSOR)
        give(heap, rest)
    hole = _merge_holes(heap, hole)
    return rest if rest >= 0 else hole


def _merge_holes(heap: Heap, hole: int) -> int:
    """Make one hole of a hole and those that touch it."""
    after = heap.blocks[hole * BLOCK_WIDTH + AFTER]
    if is_hole(heap, after):
        join(heap, hole, after)
    before = heap.blocks[hole * BLOCK_WIDTH + BEFORE]
    if is_hole(heap, before):
        join(heap, before, hole)
        return int(before)
    return hole
