"""The caching allocator's rules, each worked out by hand from its source."""

from __future__ import annotations

import random
from typing import Any

import pytest

from planner.memory.allocator import CachingAllocator, ReplayedOutOfMemoryError, rounded
from planner.memory.expandable import ExpandableAllocator
from planner.units import MIB_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "allocated_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB_BYTES),
        (513, 1024, 2 * MIB_BYTES),
        (MIB_BYTES, MIB_BYTES, 2 * MIB_BYTES),
        (MIB_BYTES + 1, MIB_BYTES + 512, 20 * MIB_BYTES),
        (10 * MIB_BYTES - 512, 10 * MIB_BYTES - 512, 20 * MIB_BYTES),
        # From 10 MiB on a segment of its own in 2 MiB steps; up to 1 MiB over is not split off.
        (10 * MIB_BYTES, 10 * MIB_BYTES, 10 * MIB_BYTES),
        (11 * MIB_BYTES, 12 * MIB_BYTES, 12 * MIB_BYTES),
        (11 * MIB_BYTES - 512, 11 * MIB_BYTES - 512, 12 * MIB_BYTES),
    ],
)
def test_a_first_request(size_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size_bytes)
    assert allocator.allocated_bytes == allocated_bytes
    assert allocator.reserved_bytes == reserved_bytes


def test_the_smallest_block_that_holds_a_request_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = (allocator.allocate(size * MIB_BYTES) for size in (40, 30))
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(29 * MIB_BYTES).address == small.address
    assert allocator.reserved_bytes == 70 * MIB_BYTES


def test_freed_neighbours_merge_whatever_the_order() -> None:
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        allocator = CachingAllocator()
        allocator.release(allocator.allocate(60 * MIB_BYTES))
        blocks = [allocator.allocate(20 * MIB_BYTES) for _ in range(3)]
        for index in order:
            allocator.release(blocks[index])
        allocator.allocate(60 * MIB_BYTES)
        assert allocator.reserved_bytes == 60 * MIB_BYTES


def test_segments_of_two_requests_never_merge() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(20 * MIB_BYTES) for _ in range(2)]:
        allocator.release(block)
    allocator.allocate(40 * MIB_BYTES)
    assert allocator.reserved_bytes == 80 * MIB_BYTES


def test_a_stream_does_not_get_another_stream_s_blocks() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB_BYTES, stream=1))
    allocator.allocate(20 * MIB_BYTES, stream=0)
    assert allocator.reserved_bytes == 40 * MIB_BYTES


def test_small_requests_never_use_large_blocks() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(20 * MIB_BYTES))
    allocator.allocate(512)
    assert allocator.reserved_bytes == 22 * MIB_BYTES


def test_the_peak_counts_whole_blocks_and_can_start_anew() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(11 * MIB_BYTES))
    assert allocator.peak_allocated_bytes == 12 * MIB_BYTES
    allocator.reset_peak()
    assert allocator.peak_allocated_bytes == 0


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken_and_later_segments_are_lower() -> (
    None
):
    # Addresses of the first three segments of a snapshot on an H200: 1188, 2374 and 2374 MiB at
    # 0x7f35aa000000, 0x7f3514000000 and 0x7f347e000000: each lower by its size in steps of 32 MiB.
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(size * MIB_BYTES) for size in (1188, 2374, 2374))
    assert first.address - second.address == 0x7F35AA000000 - 0x7F3514000000 == 2400 * MIB_BYTES
    assert second.address - third.address == 0x7F3514000000 - 0x7F347E000000
    allocator.release(second)
    allocator.release(third)
    assert allocator.allocate(2374 * MIB_BYTES).address == third.address


def test_a_segment_goes_into_the_lowest_end_of_a_chunk_that_holds_it() -> None:
    # The same snapshot: 38 MiB segments in chunks of 64 MiB, then 14, 14, 20 and 2 MiB.
    allocator = CachingAllocator()
    chunks = [allocator.allocate(38 * MIB_BYTES) for _ in range(4)]
    ends = [allocator.allocate(size * MIB_BYTES) for size in (14, 14, 20)]
    for chunk, end in zip(reversed(chunks[1:]), ends, strict=True):
        assert end.address == chunk.address + 38 * MIB_BYTES
    assert allocator.allocate(512).address == ends[0].address + 14 * MIB_BYTES


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB_BYTES)
    cached, kept = (allocator.allocate(40 * MIB_BYTES) for _ in range(2))
    allocator.release(cached)
    allocator.allocate(60 * MIB_BYTES)
    assert (allocator.num_retries, allocator.reserved_bytes) == (1, 100 * MIB_BYTES)
    assert allocator.peak_reserved_bytes == 100 * MIB_BYTES
    assert kept.size_bytes == 40 * MIB_BYTES
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(2 * MIB_BYTES)


def test_a_segment_that_holds_a_tensor_is_never_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB_BYTES)
    whole = allocator.allocate(60 * MIB_BYTES)
    allocator.release(whole)
    allocator.allocate(20 * MIB_BYTES)  # the first part of the 60 MiB segment
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(50 * MIB_BYTES)


def _requests(seed: int) -> tuple[list[int], list[int]]:
    """Requests of many sizes, released in any order: slots and sizes, negative to release."""
    chosen = random.Random(seed)
    sizes = [512, 8192, 700_000, 3 * MIB_BYTES, 9 * MIB_BYTES, 16 * MIB_BYTES, 45_000_000]
    slots, asked, held = [], [], []
    for slot in range(400):
        slots.append(slot)
        asked.append(rounded(chosen.choice(sizes) + chosen.choice((0, 0, 5000, MIB_BYTES))))
        held.append(slot)
        while held and chosen.random() < 0.48:
            slots.append(held.pop(chosen.randrange(len(held))))
            asked.append(-1)
    return slots, asked


def _counts(allocator: CachingAllocator) -> tuple[int, ...]:
    peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    return allocator.allocated_bytes, allocator.reserved_bytes, allocator.num_retries, *peaks


@pytest.mark.parametrize("capacity_bytes", [None, 2000 * MIB_BYTES])
@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_requests_in_a_list_are_served_as_one_by_one(
    kind: type[CachingAllocator], capacity_bytes: int | None
) -> None:
    for seed in range(8):
        slots, sizes = _requests(seed)
        together, apart = kind(capacity_bytes), kind(capacity_bytes)
        blocks: list[Any] = [None] * 400
        singles: list[Any] = [None] * 400
        together.serve(slots, sizes, blocks)
        for slot, size in zip(slots, sizes, strict=True):
            if size > 0:
                singles[slot] = apart.allocate(size)
            else:
                apart.release(singles[slot])
                singles[slot] = None
        assert _counts(together) == _counts(apart)
        assert together.state() == apart.state()
        left = [(b.address, b.size_bytes) for b in blocks if b is not None]
        assert left == [(b.address, b.size_bytes) for b in singles if b is not None]


def test_a_size_of_nothing_and_an_empty_slot_ask_for_nothing() -> None:
    allocator = CachingAllocator()
    blocks: list[Any] = [None, None]
    allocator.serve([0, 1, 0], [0, 512, -1], blocks)
    assert blocks[0] is None
    assert blocks[1].size_bytes == allocator.allocated_bytes == 512


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_a_state_is_known_again_once_what_came_has_gone(kind: type[CachingAllocator]) -> None:
    allocator = kind()
    allocator.allocate(30 * MIB_BYTES)
    allocator.release(allocator.allocate(40 * MIB_BYTES))
    before = allocator.state()
    block = allocator.allocate(20 * MIB_BYTES)
    assert allocator.state() != before
    allocator.release(block)
    assert allocator.state() == before
