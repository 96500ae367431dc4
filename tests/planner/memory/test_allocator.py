"""The caching allocator's rules, each worked out by hand from its source."""

from __future__ import annotations

import pytest

from planner.memory.recorder import ReplayedOutOfMemoryError
from planner.units import MIB_BYTES
from tests.planner.memory.served import Allocator


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
    allocator = Allocator()
    allocator.allocate(size_bytes)
    assert allocator.now.allocated_bytes == allocated_bytes
    assert allocator.now.reserved_bytes == reserved_bytes


def test_the_smallest_block_that_holds_a_request_is_taken() -> None:
    allocator = Allocator()
    large, small = (allocator.allocate(size * MIB_BYTES) for size in (40, 30))
    allocator.release(large)
    allocator.release(small)
    assert allocator.address(allocator.allocate(29 * MIB_BYTES)) == allocator.address(small)
    assert allocator.now.reserved_bytes == 70 * MIB_BYTES


def test_freed_neighbours_merge_whatever_the_order() -> None:
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        allocator = Allocator()
        allocator.release(allocator.allocate(60 * MIB_BYTES))
        blocks = [allocator.allocate(20 * MIB_BYTES) for _ in range(3)]
        for index in order:
            allocator.release(blocks[index])
        allocator.allocate(60 * MIB_BYTES)
        assert allocator.now.reserved_bytes == 60 * MIB_BYTES


def test_segments_of_two_requests_never_merge() -> None:
    allocator = Allocator()
    for block in [allocator.allocate(20 * MIB_BYTES) for _ in range(2)]:
        allocator.release(block)
    allocator.allocate(40 * MIB_BYTES)
    assert allocator.now.reserved_bytes == 80 * MIB_BYTES


def test_a_stream_does_not_get_another_stream_s_blocks() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(20 * MIB_BYTES, stream=1))
    allocator.allocate(20 * MIB_BYTES, stream=0)
    assert allocator.now.reserved_bytes == 40 * MIB_BYTES


def test_small_requests_never_use_large_blocks() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(20 * MIB_BYTES))
    allocator.allocate(512)
    assert allocator.now.reserved_bytes == 22 * MIB_BYTES


def test_the_peak_counts_whole_blocks_and_can_start_anew() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(11 * MIB_BYTES))
    assert allocator.now.peak_allocated_bytes == 12 * MIB_BYTES
    allocator.reset_peak()
    assert allocator.now.peak_allocated_bytes == 0


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken_and_later_segments_are_lower() -> (
    None
):
    # Addresses of the first three segments of a snapshot on an H200: 1188, 2374 and 2374 MiB at
    # 0x7f35aa000000, 0x7f3514000000 and 0x7f347e000000: each lower by its size in steps of 32 MiB.
    allocator = Allocator()
    first, second, third = (allocator.allocate(size * MIB_BYTES) for size in (1188, 2374, 2374))
    assert (
        allocator.address(first) - allocator.address(second)
        == 0x7F35AA000000 - 0x7F3514000000
        == 2400 * MIB_BYTES
    )
    assert allocator.address(second) - allocator.address(third) == 0x7F3514000000 - 0x7F347E000000
    allocator.release(second)
    allocator.release(third)
    assert allocator.address(allocator.allocate(2374 * MIB_BYTES)) == allocator.address(third)


def test_a_segment_goes_into_the_lowest_end_of_a_chunk_that_holds_it() -> None:
    # The same snapshot: 38 MiB segments in chunks of 64 MiB, then 14, 14, 20 and 2 MiB.
    allocator = Allocator()
    chunks = [allocator.allocate(38 * MIB_BYTES) for _ in range(4)]
    ends = [allocator.allocate(size * MIB_BYTES) for size in (14, 14, 20)]
    for chunk, end in zip(reversed(chunks[1:]), ends, strict=True):
        assert allocator.address(end) == allocator.address(chunk) + 38 * MIB_BYTES
    assert allocator.address(allocator.allocate(512)) == allocator.address(ends[0]) + 14 * MIB_BYTES


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    allocator = Allocator(capacity_bytes=100 * MIB_BYTES)
    cached, kept = (allocator.allocate(40 * MIB_BYTES) for _ in range(2))
    allocator.release(cached)
    allocator.allocate(60 * MIB_BYTES)
    assert (allocator.now.num_retries, allocator.now.reserved_bytes) == (1, 100 * MIB_BYTES)
    assert allocator.now.peak_reserved_bytes == 100 * MIB_BYTES
    assert kept.size_bytes == 40 * MIB_BYTES
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(2 * MIB_BYTES)


def test_a_segment_that_holds_a_tensor_is_never_given_back() -> None:
    allocator = Allocator(capacity_bytes=100 * MIB_BYTES)
    whole = allocator.allocate(60 * MIB_BYTES)
    allocator.release(whole)
    allocator.allocate(20 * MIB_BYTES)  # the first part of the 60 MiB segment
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(50 * MIB_BYTES)
