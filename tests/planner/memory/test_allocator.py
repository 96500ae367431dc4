"""The caching allocator's rules, each worked out by hand from its source."""

from __future__ import annotations

import pytest

from planner.memory.allocator import CachingAllocator
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
