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

from planner.memory.blocks import (
    ABOVE,
    ADDRESS,
    AFTER,
    BEFORE,
    BLOCK_WIDTH,
    CLASS_POOL,
    CLASS_SIZE,
    CLASS_WIDTH,
    END_ADDRESS,
    END_SIZE,
    END_WIDTH,
    LARGE_SEGMENT_BYTES,
    LARGEST_END,
    LOWEST,
    MOST_LISTED,
    NEXT_ADDRESS,
    NOTHING,
    NUM_ENDS,
    NUM_LISTED,
    POOL_WIDTH,
    RESERVED,
    RETRIES,
    ROUNDING_BYTES,
    SIZE,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    STATUS,
    TABLES_FULL,
    TENSOR,
    Heap,
    best,
    cut,
    drop,
    give,
    has_room,
    has_rows,
    new_block,
    position_of,
    reserve,
    take,
)
from planner.units import MIB_BYTES

LARGE_REQUEST_BYTES = 10 * MIB_BYTES
SEGMENT_STEP_BYTES = 2 * MIB_BYTES
_CHUNK_BYTES = 32 * MIB_BYTES


def fit(heap: Heap, wanted: int) -> int:
    """The best block for a class's size, split where enough would be left; or NOTHING."""
    size = heap.classes[wanted * CLASS_WIDTH + CLASS_SIZE]
    pool = heap.classes[wanted * CLASS_WIDTH + CLASS_POOL]
    block = best(heap, pool, position_of(heap, wanted))
    if block >= 0:
        take(heap, block)
    else:
        block = _new_segment(heap, size, pool)
        if block < 0:
            return NOTHING
    left = heap.blocks[block * BLOCK_WIDTH + SIZE] - size
    is_small = size <= SMALL_REQUEST_BYTES
    if left > SMALL_REQUEST_BYTES or (is_small and left >= ROUNDING_BYTES):
        give(heap, cut(heap, block, size, TENSOR))
    return block


def _new_segment(heap: Heap, size: int, pool: int) -> int:
    """A segment for a request, as one block; NOTHING where there is no memory for it."""
    segment = _segment_bytes(size)
    if not has_room(heap, segment):
        if not has_rows(heap, 3):
            heap.counts[STATUS] = TABLES_FULL
            return NOTHING
        give_back_segments(heap)
        heap.counts[RETRIES] += 1
        if not has_room(heap, segment):
            return NOTHING
    reserve(heap, segment)
    return new_block(heap, _place(heap, segment), segment, pool, TENSOR)


def _segment_bytes(size: int) -> int:
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _place(heap: Heap, segment: int) -> int:
    """The address of a new segment."""
    counts, ends = heap.counts, heap.ends
    if segment <= counts[LARGEST_END]:
        largest = 0
        for number in range(counts[NUM_ENDS] - 1, -1, -1):
            row = number * END_WIDTH
            if ends[row + END_SIZE] >= segment:
                address = ends[row + END_ADDRESS]
                ends[row + END_ADDRESS] += segment
                ends[row + END_SIZE] -= segment
                if ends[row + END_SIZE] == 0:
                    counts[NUM_ENDS] -= 1
                    for other in range(row, counts[NUM_ENDS] * END_WIDTH):
                        ends[other] = ends[other + END_WIDTH]
                return int(address)
            largest = max(largest, ends[row + END_SIZE])
        # Only now is the bound worth its price: ends are many, and most segments larger than all.
        counts[LARGEST_END] = largest
    chunk = -(-segment // _CHUNK_BYTES) * _CHUNK_BYTES
    counts[NEXT_ADDRESS] -= chunk
    if chunk > segment:
        _add_end(heap, counts[NEXT_ADDRESS] + segment, chunk - segment)
    return int(counts[NEXT_ADDRESS])


def _add_end(heap: Heap, address: int, size: int) -> None:
    """Add room at the end of a chunk; the highest comes first."""
    counts, ends = heap.counts, heap.ends
    row = counts[NUM_ENDS] * END_WIDTH
    while row > 0 and ends[row - END_WIDTH + END_ADDRESS] < address:
        ends[row + END_ADDRESS] = ends[row - END_WIDTH + END_ADDRESS]
        ends[row + END_SIZE] = ends[row - END_WIDTH + END_SIZE]
        row -= END_WIDTH
    ends[row + END_ADDRESS], ends[row + END_SIZE] = address, size
    counts[NUM_ENDS] += 1
    counts[LARGEST_END] = max(counts[LARGEST_END], size)


def give_back_segments(heap: Heap) -> None:
    """Give back all segments without a tensor."""
    for pool in range(len(heap.pools) // POOL_WIDTH):
        _give_back_of(heap, pool)


def _give_back_of(heap: Heap, pool: int) -> None:
    blocks, first = heap.blocks, pool * heap.counts[MOST_LISTED]
    for at in range(first, first + heap.pools[pool * POOL_WIDTH + NUM_LISTED]):
        block = heap.classes[heap.listed[at] * CLASS_WIDTH + LOWEST]
        while block >= 0:
            row = block * BLOCK_WIDTH
            above = blocks[row + ABOVE]
            if blocks[row + BEFORE] < 0 and blocks[row + AFTER] < 0:
                take(heap, block)
                heap.counts[RESERVED] -= blocks[row + SIZE]
                _add_end(heap, blocks[row + ADDRESS], blocks[row + SIZE])
                drop(heap, block)
            block = above
