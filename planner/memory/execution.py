"""Serves a recorded program: every operation and every request of it, in order.

An operation is four integers, what it does and with what; see the list of them below. Requests are
those of a model's traced sections, laid out once (see `requests`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.memory.allocator import fit, give_back_segments
from planner.memory.blocks import (
    ALLOCATED,
    BLOCK_WIDTH,
    CAPACITY,
    CLASS_WIDTH,
    IS_EXPANDABLE,
    LOWEST,
    MOST_LISTED,
    NEXT_ADDRESS,
    NOTHING,
    NUM_COUNTS,
    NUM_EVENTS,
    OUT_OF_MEMORY,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    POOL_WIDTH,
    RESERVED,
    SERVED,
    SIZE,
    SMALL_REQUEST_BYTES,
    SPARE,
    STATUS,
    TABLES_FULL,
    TOP_ADDRESS,
    Heap,
    class_of,
    has_rows,
    release,
    take,
)
from planner.memory.expandable import fit_in_range, unmap_all

# What an operation does, with the numbers behind it:
#   SERVE first, end, base: requests first to end, for slots from base on
#   TAKE slot, bytes, stream: fill a slot, unless it is filled
#   GIVE slot: empty it, if it is filled
#   MOVE slot, other: put into a slot what another one holds, if anything
#   TAKE_LIKE slot, other, stream: fill a slot with as much as another one holds
#   FORGET slot, count: of so many slots, what they hold
#   BEGIN_STEP: let the peak begin at what is allocated now
#   EMPTY_CACHE: give back all free segments, as torch.cuda.empty_cache does, and forget their peak
SERVE, TAKE, GIVE, MOVE, TAKE_LIKE, FORGET, BEGIN_STEP, EMPTY_CACHE = range(8)
OPERATION_WIDTH = 4
# What is noted of a block that was taken (its bytes) or given back (less than 0): by which
# operation, by which of its requests or NOTHING, in which slot, and what is reserved by then.
EVENT_WIDTH = 5


class Requests(NamedTuple):
    """Requests in order: for which slot, of which kind; of each kind its bytes and class.

    NOTHING as a kind releases what the slot holds, if anything; a kind of 0 bytes does nothing.
    """

    slots: Any
    kinds: Any
    sizes: Any
    classes: Any


def serve(
    heap: Heap,
    requests: Requests,
    operations: Any,
    num_before: int,
    repeats: int,
    held: Any,
    events: Any,
    capacity_bytes: int,
    is_expandable: bool,
) -> None:
    """Serve a program, all behind its first `num_before` operations `repeats` times.

    The counts of `heap` are the result. Memory ends at `capacity_bytes`, unless it is NOTHING.
    `held` has NOTHING for every slot; `events` are noted unless it is empty.
    """
    _begin(heap, requests, capacity_bytes, is_expandable)
    _run(heap, requests, operations, 0, num_before, held, events)
    for _ in range(repeats):
        _run(
            heap, requests, operations, num_before, len(operations) // OPERATION_WIDTH, held, events
        )


def _begin(heap: Heap, requests: Requests, capacity_bytes: int, is_expandable: bool) -> None:
    counts = heap.counts
    for number in range(NUM_COUNTS):
        counts[number] = 0
    counts[CAPACITY], counts[IS_EXPANDABLE] = capacity_bytes, int(is_expandable)
    counts[NEXT_ADDRESS], counts[SPARE] = TOP_ADDRESS, NOTHING
    counts[MOST_LISTED] = len(heap.listed) * POOL_WIDTH // len(heap.pools)
    for number in range(len(heap.classes_at)):
        heap.classes_at[number] = NOTHING
    for number in range(len(heap.pools)):
        heap.pools[number] = NOTHING if number % POOL_WIDTH else 0
    for kind in range(len(requests.sizes)):
        size = requests.sizes[kind]
        # In a range, a block of that very size need not be the best.
        has_class = size > 0 and not is_expandable
        requests.classes[kind] = class_of(heap, size, _pool(size, 0)) if has_class else NOTHING


def _run(
    heap: Heap, requests: Requests, operations: Any, first: int, last: int, held: Any, events: Any
) -> None:
    for number in range(first, last):
        if heap.counts[STATUS] != SERVED:
            return
        row = number * OPERATION_WIDTH
        operation, slot, other = operations[row], operations[row + 1], operations[row + 2]
        third = operations[row + 3]
        if operation == SERVE:
            _serve_requests(heap, requests, slot, other, third, held, events, number)
        elif operation == TAKE:
            if held[slot] < 0:
                _fill(heap, held, slot, other, third, events, number)
        elif operation == GIVE:
            _empty(heap, held, slot, events, number, NOTHING)
        elif operation == TAKE_LIKE:
            size = heap.blocks[held[other] * BLOCK_WIDTH + SIZE]
            _fill(heap, held, slot, size, third, events, number)
        elif operation == MOVE:
            held[slot], held[other] = held[other], NOTHING
        elif operation == FORGET:
            for forgotten in range(slot, slot + other):
                held[forgotten] = NOTHING
        elif operation == BEGIN_STEP:
            heap.counts[PEAK_ALLOCATED] = heap.counts[ALLOCATED]
        elif operation == EMPTY_CACHE:
            _give_back(heap)
            heap.counts[PEAK_RESERVED] = heap.counts[RESERVED]


def _serve_requests(
    heap: Heap,
    requests: Requests,
    first: int,
    end: int,
    base: int,
    held: Any,
    events: Any,
    number: int,
) -> None:
    """Serve requests of the default stream; most find a free block of their very size."""
    slots, kinds, sizes = requests.slots, requests.kinds, requests.sizes
    for at in range(first, end):
        kind, slot = kinds[at], base + slots[at]
        if kind < 0:
            _empty(heap, held, slot, events, number, at)
        elif sizes[kind] > 0:
            block, wanted = NOTHING, requests.classes[kind]
            if wanted >= 0:
                block = heap.classes[wanted * CLASS_WIDTH + LOWEST]
            if block >= 0:
                take(heap, block)
            else:
                block = _allocate(heap, sizes[kind], _pool(sizes[kind], 0), wanted)
                if block < 0:
                    return
            held[slot] = block
            _count(heap, heap.blocks[block * BLOCK_WIDTH + SIZE], events, number, at, slot)


def _pool(size: int, stream: int) -> int:
    """The pool of requests of a size on a stream; large ones have odd numbers."""
    return 2 * stream + (1 if size > SMALL_REQUEST_BYTES else 0)


def _allocate(heap: Heap, size: int, pool: int, wanted: int) -> int:
    """A block for a request, whose class may be known; or NOTHING, and in the status why."""
    if not has_rows(heap, 1):
        heap.counts[STATUS] = TABLES_FULL
        return NOTHING
    if heap.counts[IS_EXPANDABLE]:
        block = fit_in_range(heap, size, pool)
    else:
        block = fit(heap, wanted if wanted >= 0 else class_of(heap, size, pool))
    if block < 0 and heap.counts[STATUS] == SERVED:
        heap.counts[STATUS] = OUT_OF_MEMORY
    return block


def _fill(
    heap: Heap, held: Any, slot: int, size: int, stream: int, events: Any, number: int
) -> None:
    block = _allocate(heap, size, _pool(size, stream), NOTHING)
    if block >= 0:
        held[slot] = block
        _count(heap, heap.blocks[block * BLOCK_WIDTH + SIZE], events, number, NOTHING, slot)


def _empty(heap: Heap, held: Any, slot: int, events: Any, number: int, at: int) -> None:
    block = held[slot]
    if block >= 0:
        if not has_rows(heap, 1):
            heap.counts[STATUS] = TABLES_FULL
            return
        held[slot] = NOTHING
        _count(heap, -heap.blocks[block * BLOCK_WIDTH + SIZE], events, number, at, slot)
        release(heap, block)


def _count(heap: Heap, size: int, events: Any, number: int, at: int, slot: int) -> None:
    """Count what is allocated, and note it where events are."""
    counts = heap.counts
    counts[ALLOCATED] += size
    if counts[ALLOCATED] > counts[PEAK_ALLOCATED]:
        counts[PEAK_ALLOCATED] = counts[ALLOCATED]
    if len(events) > 0:
        row = counts[NUM_EVENTS] * EVENT_WIDTH
        events[row], events[row + 1], events[row + 2] = number, at, slot
        events[row + 3], events[row + 4] = size, counts[RESERVED]
        counts[NUM_EVENTS] += 1


def _give_back(heap: Heap) -> None:
    if not has_rows(heap, 3):
        heap.counts[STATUS] = TABLES_FULL
    elif heap.counts[IS_EXPANDABLE]:
        unmap_all(heap)
    else:
        give_back_segments(heap)
