"""The blocks of a replayed allocator: tables of integers, and free blocks by size and address.

The functions here, in `allocator`, `expandable` and `execution` work on flat tables, lists or arrays
alike, and use nothing else: Python runs them as they are, and `compiled` compiles them. A free block
is found by its *class*: all free blocks of one size in one pool, in the order of their addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.units import MIB_BYTES

ROUNDING_BYTES = 512
SMALL_REQUEST_BYTES = MIB_BYTES
SMALL_SEGMENT_BYTES = 2 * MIB_BYTES
LARGE_SEGMENT_BYTES = 20 * MIB_BYTES
TOP_ADDRESS = 1 << 47
NOTHING = -1

# A block: where it is, its neighbours in the segment, its stream's pool, its class, and the free
# blocks of its class below and above it. Of a block that is not free BELOW says what it is.
ADDRESS, SIZE, BEFORE, AFTER, POOL, CLASS, BELOW, ABOVE = range(8)
BLOCK_WIDTH = 8
TENSOR, HOLE = -2, -3
# A class: its size and pool, its lowest and highest free block, whether the pool lists it, and where
# in that list a search for its size ended last.
CLASS_SIZE, CLASS_POOL, LOWEST, HIGHEST, IS_LISTED, SOUGHT_AT = range(6)
CLASS_WIDTH = 8
# A pool: the number of classes it lists, and the first block of the range it grows in.
NUM_LISTED, FIRST_BLOCK = range(2)
POOL_WIDTH = 2
# Where a chunk has room at its end.
END_ADDRESS, END_SIZE = range(2)
END_WIDTH = 2
# Single numbers.
(
    ALLOCATED,
    RESERVED,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    RETRIES,
    STATUS,
    CAPACITY,
    IS_EXPANDABLE,
    NUM_EVENTS,
    NEXT_ADDRESS,
    NUM_BLOCKS,
    SPARE,
    NUM_CLASSES,
    NUM_ENDS,
    LARGEST_END,
    MOST_LISTED,
) = range(16)
NUM_COUNTS = 16
# What STATUS says.
SERVED, OUT_OF_MEMORY, TABLES_FULL = range(3)
# So many classes without a block are passed by in a search before they are dropped: to list them anew
# takes longer than to pass them.
_MOST_PASSED = 32
# Rows that one request can add to a table, where no memory is given back.
_MARGIN = 8


class Heap(NamedTuple):
    """An allocator's tables; `classes_at` finds a class by the hash of its size and pool.

    `listed` has, pool by pool, the classes by size. One without a block stays listed, for steps ask
    for the same sizes again and again; a search that comes across many of them drops them.
    """

    blocks: Any
    classes: Any
    classes_at: Any
    listed: Any
    pools: Any
    ends: Any
    counts: Any


def class_of(heap: Heap, size: int, pool: int) -> int:
    """The class of a size in a pool; a new one, if there was none."""
    classes, classes_at = heap.classes, heap.classes_at
    mask = len(classes_at) - 1
    at = ((size // ROUNDING_BYTES + pool) * 40503 >> 6) & mask
    found = classes_at[at]
    while found >= 0:
        row = found * CLASS_WIDTH
        if classes[row + CLASS_SIZE] == size and classes[row + CLASS_POOL] == pool:
            return int(found)
        at = (at + 1) & mask
        found = classes_at[at]
    found = heap.counts[NUM_CLASSES]
    heap.counts[NUM_CLASSES] = found + 1
    classes_at[at] = found
    row = found * CLASS_WIDTH
    classes[row + CLASS_SIZE], classes[row + CLASS_POOL] = size, pool
    classes[row + LOWEST], classes[row + HIGHEST] = NOTHING, NOTHING
    classes[row + IS_LISTED], classes[row + SOUGHT_AT] = 0, 0
    return int(found)


def position(heap: Heap, pool: int, size: int) -> int:
    """Where in `listed` the classes of a pool of at least `size` bytes begin."""
    low = pool * heap.counts[MOST_LISTED]
    high = low + heap.pools[pool * POOL_WIDTH + NUM_LISTED]
    while low < high:
        middle = (low + high) // 2
        if heap.classes[heap.listed[middle] * CLASS_WIDTH + CLASS_SIZE] < size:
            low = middle + 1
        else:
            high = middle
    return int(low)


def position_of(heap: Heap, wanted: int) -> int:
    """The same for a class's pool and size: near where it was the last time."""
    listed, classes, row = heap.listed, heap.classes, wanted * CLASS_WIDTH
    pool, size = classes[row + CLASS_POOL], classes[row + CLASS_SIZE]
    low = pool * heap.counts[MOST_LISTED]
    end = low + heap.pools[pool * POOL_WIDTH + NUM_LISTED]
    at = min(max(classes[row + SOUGHT_AT], low), end)
    while at > low and classes[listed[at - 1] * CLASS_WIDTH + CLASS_SIZE] >= size:
        at -= 1
    while at < end and classes[listed[at] * CLASS_WIDTH + CLASS_SIZE] < size:
        at += 1
    classes[row + SOUGHT_AT] = at
    return int(at)


def give(heap: Heap, block: int) -> None:
    """Make a block free."""
    blocks, row = heap.blocks, block * BLOCK_WIDTH
    if blocks[row + CLASS] < 0:
        blocks[row + CLASS] = class_of(heap, blocks[row + SIZE], blocks[row + POOL])
    class_row = blocks[row + CLASS] * CLASS_WIDTH
    if not heap.classes[class_row + IS_LISTED]:
        _list(heap, blocks[row + CLASS])
    _link(heap, block, class_row)


def _list(heap: Heap, added: int) -> None:
    """List a class in its pool."""
    listed, row = heap.listed, added * CLASS_WIDTH
    pool = heap.classes[row + CLASS_POOL]
    at = position(heap, pool, heap.classes[row + CLASS_SIZE])
    end = pool * heap.counts[MOST_LISTED] + heap.pools[pool * POOL_WIDTH + NUM_LISTED]
    while end > at:
        listed[end] = listed[end - 1]
        end -= 1
    listed[at] = added
    heap.pools[pool * POOL_WIDTH + NUM_LISTED] += 1
    heap.classes[row + IS_LISTED] = 1


def _link(heap: Heap, block: int, class_row: int) -> None:
    """Put a block among the free ones of its class, by address: sought from the nearer end."""
    blocks, classes, row = heap.blocks, heap.classes, block * BLOCK_WIDTH
    address, below = blocks[row + ADDRESS], classes[class_row + HIGHEST]
    above = NOTHING
    if below >= 0 and blocks[below * BLOCK_WIDTH + ADDRESS] > address:
        lowest = classes[class_row + LOWEST]
        middle = blocks[lowest * BLOCK_WIDTH + ADDRESS] + blocks[below * BLOCK_WIDTH + ADDRESS]
        if 2 * address < middle:
            below, above = NOTHING, lowest
            while blocks[above * BLOCK_WIDTH + ADDRESS] < address:
                below, above = above, blocks[above * BLOCK_WIDTH + ABOVE]
        else:
            while below >= 0 and blocks[below * BLOCK_WIDTH + ADDRESS] > address:
                below, above = blocks[below * BLOCK_WIDTH + BELOW], below
    if below < 0:
        classes[class_row + LOWEST] = block
    else:
        blocks[below * BLOCK_WIDTH + ABOVE] = block
    if above < 0:
        classes[class_row + HIGHEST] = block
    else:
        blocks[above * BLOCK_WIDTH + BELOW] = block
    blocks[row + BELOW], blocks[row + ABOVE] = below, above


def take(heap: Heap, block: int) -> None:
    """Make a free block one with a tensor."""
    blocks, classes, row = heap.blocks, heap.classes, block * BLOCK_WIDTH
    class_row = blocks[row + CLASS] * CLASS_WIDTH
    below, above = blocks[row + BELOW], blocks[row + ABOVE]
    if below < 0:
        classes[class_row + LOWEST] = above
    else:
        blocks[below * BLOCK_WIDTH + ABOVE] = above
    if above < 0:
        classes[class_row + HIGHEST] = below
    else:
        blocks[above * BLOCK_WIDTH + BELOW] = below
    blocks[row + BELOW] = TENSOR


def best(heap: Heap, pool: int, begin: int) -> int:
    """The smallest free block of the classes from `begin` on, of equal ones the lowest; or NOTHING."""
    listed, classes, at = heap.listed, heap.classes, begin
    end = pool * heap.counts[MOST_LISTED] + heap.pools[pool * POOL_WIDTH + NUM_LISTED]
    while at < end and classes[listed[at] * CLASS_WIDTH + LOWEST] < 0:
        at += 1
    found = NOTHING
    if at < end:
        found = classes[listed[at] * CLASS_WIDTH + LOWEST]
    if at - begin > _MOST_PASSED:
        _drop_listed(heap, pool, begin, at, end)
    return found


def _drop_listed(heap: Heap, pool: int, begin: int, at: int, end: int) -> None:
    """Take from a pool's list, which ends at `end`, the classes from `begin` up to `at`."""
    listed, classes = heap.listed, heap.classes
    heap.pools[pool * POOL_WIDTH + NUM_LISTED] -= at - begin
    for gone in range(begin, at):
        classes[listed[gone] * CLASS_WIDTH + IS_LISTED] = 0
    while at < end:
        listed[begin] = listed[at]
        begin += 1
        at += 1


def new_block(heap: Heap, address: int, size: int, pool: int, state: int) -> int:
    """A block that is not free, in a spare row or a new one."""
    blocks, counts = heap.blocks, heap.counts
    block = counts[SPARE]
    if block >= 0:
        counts[SPARE] = blocks[block * BLOCK_WIDTH + ABOVE]
    else:
        block = counts[NUM_BLOCKS]
        counts[NUM_BLOCKS] = block + 1
    row = block * BLOCK_WIDTH
    blocks[row + ADDRESS], blocks[row + SIZE], blocks[row + POOL] = address, size, pool
    blocks[row + BEFORE], blocks[row + AFTER] = NOTHING, NOTHING
    blocks[row + CLASS], blocks[row + BELOW] = NOTHING, state
    return int(block)


def drop(heap: Heap, block: int) -> None:
    """Forget a block: its row is spare."""
    heap.blocks[block * BLOCK_WIDTH + ABOVE] = heap.counts[SPARE]
    heap.counts[SPARE] = block


def cut(heap: Heap, block: int, size: int, state: int) -> int:
    """Cut a block to `size` bytes; the rest of it is a block in that state."""
    blocks, row = heap.blocks, block * BLOCK_WIDTH
    left = blocks[row + SIZE] - size
    rest = new_block(heap, blocks[row + ADDRESS] + size, left, blocks[row + POOL], state)
    after = blocks[row + AFTER]
    blocks[rest * BLOCK_WIDTH + BEFORE], blocks[rest * BLOCK_WIDTH + AFTER] = block, after
    if after >= 0:
        blocks[after * BLOCK_WIDTH + BEFORE] = rest
    blocks[row + AFTER], blocks[row + SIZE] = rest, size
    blocks[row + CLASS] = NOTHING
    return rest


def join(heap: Heap, block: int, after: int) -> None:
    """Add to a block the one behind it; neither is free."""
    blocks, row, after_row = heap.blocks, block * BLOCK_WIDTH, after * BLOCK_WIDTH
    blocks[row + SIZE] += blocks[after_row + SIZE]
    blocks[row + CLASS] = NOTHING
    behind = blocks[after_row + AFTER]
    blocks[row + AFTER] = behind
    if behind >= 0:
        blocks[behind * BLOCK_WIDTH + BEFORE] = block
    drop(heap, after)


def is_free(heap: Heap, block: int) -> bool:
    """Whether a block is there and free."""
    return bool(block >= 0 and heap.blocks[block * BLOCK_WIDTH + BELOW] >= NOTHING)


def is_hole(heap: Heap, block: int) -> bool:
    """Whether a block is there and has addresses without memory."""
    return bool(block >= 0 and heap.blocks[block * BLOCK_WIDTH + BELOW] == HOLE)


def release(heap: Heap, block: int) -> None:
    """Make a block free, as one with its free neighbours."""
    blocks = heap.blocks
    after = blocks[block * BLOCK_WIDTH + AFTER]
    if is_free(heap, after):
        take(heap, after)
        join(heap, block, after)
    before = blocks[block * BLOCK_WIDTH + BEFORE]
    if is_free(heap, before):
        take(heap, before)
        join(heap, before, block)
        block = before
    give(heap, block)


def has_room(heap: Heap, size: int) -> bool:
    """Whether so many bytes more can be reserved."""
    capacity = heap.counts[CAPACITY]
    return bool(capacity < 0 or heap.counts[RESERVED] + size <= capacity)


def reserve(heap: Heap, size: int) -> None:
    """Count so many bytes more as reserved."""
    counts = heap.counts
    counts[RESERVED] += size
    counts[PEAK_RESERVED] = max(counts[PEAK_RESERVED], counts[RESERVED])


def has_rows(heap: Heap, times: int) -> bool:
    """Whether the tables have room for so many times what is in them, and what a request adds."""
    counts = heap.counts
    most = max(counts[NUM_BLOCKS], counts[NUM_CLASSES], counts[NUM_ENDS])
    return bool(times * most + _MARGIN <= counts[MOST_LISTED])
