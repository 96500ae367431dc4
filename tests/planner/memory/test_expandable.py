"""Expandable segments: sequences worked out by hand from the allocator's source."""

from __future__ import annotations

import itertools
import random

import pytest

from planner.memory.allocator import Block, CachingAllocator, ReplayedOutOfMemoryError
from planner.memory.expandable import ExpandableAllocator
from planner.units import MIB_BYTES


def _reserved_mib(allocator: CachingAllocator) -> float:
    return allocator.reserved_bytes / MIB_BYTES


@pytest.mark.parametrize(
    ("size_bytes", "allocated_bytes", "reserved_mib"),
    [
        (1, 512, 2),
        (MIB_BYTES, MIB_BYTES, 2),
        (MIB_BYTES + 1, MIB_BYTES + 512, 20),
        (10 * MIB_BYTES, 10 * MIB_BYTES, 20),
        # What is left is split off however small: no whole block counts as allocated.
        (20 * MIB_BYTES - 512, 20 * MIB_BYTES - 512, 20),
        (20 * MIB_BYTES + 1, 20 * MIB_BYTES + 512, 40),
        (100 * MIB_BYTES, 100 * MIB_BYTES, 100),
    ],
)
def test_a_first_request_maps_whole_granules(
    size_bytes: int, allocated_bytes: int, reserved_mib: int
) -> None:
    allocator = ExpandableAllocator()
    allocator.allocate(size_bytes)
    assert allocator.allocated_bytes == allocated_bytes
    assert _reserved_mib(allocator) == reserved_mib


def test_requests_share_one_growing_segment() -> None:
    # 15 + 15 + 15 = 45 MiB in three granules; segments of their own would take 48.
    allocator = ExpandableAllocator()
    for _ in range(3):
        allocator.allocate(15 * MIB_BYTES)
    assert _reserved_mib(allocator) == 60
    allocator.allocate(15 * MIB_BYTES)
    assert _reserved_mib(allocator) == 60


def test_a_free_end_grows_in_place() -> None:
    # 30 MiB freed at the end: 50 MiB need only 20 more (a second segment would take 50).
    allocator = ExpandableAllocator()
    kept = allocator.allocate(10 * MIB_BYTES)
    allocator.release(allocator.allocate(30 * MIB_BYTES))
    assert _reserved_mib(allocator) == 40
    grown = allocator.allocate(50 * MIB_BYTES)
    assert grown.address == kept.address + 10 * MIB_BYTES
    assert _reserved_mib(allocator) == 60


def test_a_hole_goes_before_the_end_that_can_grow() -> None:
    # A hole of 40 MiB and a free end of 20: 15 MiB fit the end best, yet take the hole.
    allocator = ExpandableAllocator()
    hole = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(40 * MIB_BYTES)
    allocator.release(allocator.allocate(20 * MIB_BYTES))
    allocator.release(hole)
    assert allocator.allocate(15 * MIB_BYTES).address == hole.address


def test_the_smallest_hole_that_holds_a_request_is_taken() -> None:
    allocator = ExpandableAllocator()
    large = allocator.allocate(60 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    small = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(30 * MIB_BYTES).address == small.address
    assert _reserved_mib(allocator) == 140


def test_streams_and_pools_have_ranges_of_their_own() -> None:
    allocator = ExpandableAllocator()
    allocator.release(allocator.allocate(20 * MIB_BYTES))
    allocator.allocate(20 * MIB_BYTES, stream=1)
    allocator.allocate(512)
    assert _reserved_mib(allocator) == 42


def test_a_free_end_grows_to_the_last_granule_of_the_capacity() -> None:
    # Of 100 MiB: 10 held, 50 free behind them, 20 of another stream. 70 grow the free end by 20.
    allocator = ExpandableAllocator(100 * MIB_BYTES)
    allocator.allocate(10 * MIB_BYTES)
    allocator.release(allocator.allocate(50 * MIB_BYTES))
    allocator.allocate(20 * MIB_BYTES, stream=1)
    assert _reserved_mib(allocator) == 80
    allocator.allocate(70 * MIB_BYTES)
    assert (_reserved_mib(allocator), allocator.num_retries) == (100, 0)
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(1 * MIB_BYTES + 1)


def test_another_stream_s_granules_are_given_back() -> None:
    allocator = ExpandableAllocator(100 * MIB_BYTES)
    allocator.release(allocator.allocate(70 * MIB_BYTES, stream=1))
    assert _reserved_mib(allocator) == 80
    allocator.allocate(100 * MIB_BYTES)
    assert allocator.num_retries == 1
    assert _reserved_mib(allocator) == 100
    assert allocator.peak_reserved_bytes == 100 * MIB_BYTES


def test_a_hole_in_the_middle_is_mapped_again_before_the_end() -> None:
    # 40 MiB between two tensors are unmapped; 30 MiB come back there, as 40 mapped.
    allocator = ExpandableAllocator(120 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    middle = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    allocator.release(middle)
    allocator.allocate(80 * MIB_BYTES, stream=1)
    assert (allocator.num_retries, _reserved_mib(allocator)) == (1, 120)
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(30 * MIB_BYTES)
    allocator = ExpandableAllocator()
    allocator.allocate(20 * MIB_BYTES)
    middle = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    allocator.release(middle)
    allocator.empty_cache()
    assert _reserved_mib(allocator) == 40
    assert allocator.allocate(30 * MIB_BYTES).address == middle.address
    assert _reserved_mib(allocator) == 80


def test_a_random_history_keeps_its_books() -> None:
    """Blocks never overlap, memory covers them, and what is freed can all be given back."""
    source = random.Random(7)
    allocator = ExpandableAllocator()
    held: list[Block] = []
    for _ in range(2000):
        if held and source.random() < 0.5:
            allocator.release(held.pop(source.randrange(len(held))))
        else:
            size = source.choice((512, 3000, MIB_BYTES, 3 * MIB_BYTES, 33 * MIB_BYTES))
            held.append(allocator.allocate(size, stream=source.randrange(2)))
        if source.random() < 0.02:
            allocator.empty_cache()
        spans = sorted((block.address, block.address + block.size_bytes) for block in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        total = sum(block.size_bytes for block in held)
        assert total == allocator.allocated_bytes <= allocator.reserved_bytes
        free = sum(entry[0] for place in allocator._ranges.values() for entry in place.free)
        assert allocator.reserved_bytes == total + free
    for block in held:
        allocator.release(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
