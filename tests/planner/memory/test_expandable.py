"""Expandable segments: sequences worked out by hand from the allocator's source."""

from __future__ import annotations

import pytest

from planner.memory.recorder import ReplayedOutOfMemoryError
from planner.units import MIB_BYTES
from tests.planner.memory.served import Allocator


def _reserved_mib(allocator: Allocator) -> float:
    return allocator.now.reserved_bytes / MIB_BYTES


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
    allocator = Allocator(is_expandable=True)
    allocator.allocate(size_bytes)
    assert allocator.now.allocated_bytes == allocated_bytes
    assert _reserved_mib(allocator) == reserved_mib


def test_requests_share_one_growing_segment() -> None:
    # 15 + 15 + 15 = 45 MiB in three granules; segments of their own would take 48.
    allocator = Allocator(is_expandable=True)
    for _ in range(3):
        allocator.allocate(15 * MIB_BYTES)
    assert _reserved_mib(allocator) == 60
    allocator.allocate(15 * MIB_BYTES)
    assert _reserved_mib(allocator) == 60


def test_a_free_end_grows_in_place() -> None:
    # 30 MiB freed at the end: 50 MiB need only 20 more (a second segment would take 50).
    allocator = Allocator(is_expandable=True)
    kept = allocator.allocate(10 * MIB_BYTES)
    allocator.release(allocator.allocate(30 * MIB_BYTES))
    assert _reserved_mib(allocator) == 40
    grown = allocator.allocate(50 * MIB_BYTES)
    assert allocator.address(grown) == allocator.address(kept) + 10 * MIB_BYTES
    assert _reserved_mib(allocator) == 60


def test_a_hole_goes_before_the_end_that_can_grow() -> None:
    # A hole of 40 MiB and a free end of 20: 15 MiB fit the end best, yet take the hole.
    allocator = Allocator(is_expandable=True)
    hole = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(40 * MIB_BYTES)
    allocator.release(allocator.allocate(20 * MIB_BYTES))
    allocator.release(hole)
    assert allocator.address(allocator.allocate(15 * MIB_BYTES)) == allocator.address(hole)


def test_the_smallest_hole_that_holds_a_request_is_taken() -> None:
    allocator = Allocator(is_expandable=True)
    large = allocator.allocate(60 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    small = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    allocator.release(large)
    allocator.release(small)
    assert allocator.address(allocator.allocate(30 * MIB_BYTES)) == allocator.address(small)
    assert _reserved_mib(allocator) == 140


def test_streams_and_pools_have_ranges_of_their_own() -> None:
    allocator = Allocator(is_expandable=True)
    allocator.release(allocator.allocate(20 * MIB_BYTES))
    allocator.allocate(20 * MIB_BYTES, stream=1)
    allocator.allocate(512)
    assert _reserved_mib(allocator) == 42


def test_a_free_end_grows_to_the_last_granule_of_the_capacity() -> None:
    # Of 100 MiB: 10 held, 50 free behind them, 20 of another stream. 70 grow the free end by 20.
    allocator = Allocator(100 * MIB_BYTES, is_expandable=True)
    allocator.allocate(10 * MIB_BYTES)
    allocator.release(allocator.allocate(50 * MIB_BYTES))
    allocator.allocate(20 * MIB_BYTES, stream=1)
    assert _reserved_mib(allocator) == 80
    allocator.allocate(70 * MIB_BYTES)
    assert (_reserved_mib(allocator), allocator.now.num_retries) == (100, 0)
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(1 * MIB_BYTES + 1)


def test_another_stream_s_granules_are_given_back() -> None:
    allocator = Allocator(100 * MIB_BYTES, is_expandable=True)
    allocator.release(allocator.allocate(70 * MIB_BYTES, stream=1))
    assert _reserved_mib(allocator) == 80
    allocator.allocate(100 * MIB_BYTES)
    assert allocator.now.num_retries == 1
    assert _reserved_mib(allocator) == 100
    assert allocator.now.peak_reserved_bytes == 100 * MIB_BYTES


def test_a_hole_in_the_middle_is_mapped_again_before_the_end() -> None:
    # 40 MiB between two tensors are unmapped; 30 MiB come back there, as 40 mapped.
    allocator = Allocator(120 * MIB_BYTES, is_expandable=True)
    allocator.allocate(20 * MIB_BYTES)
    middle = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    allocator.release(middle)
    allocator.allocate(80 * MIB_BYTES, stream=1)
    assert (allocator.now.num_retries, _reserved_mib(allocator)) == (1, 120)
    with pytest.raises(ReplayedOutOfMemoryError):
        allocator.allocate(30 * MIB_BYTES)
    allocator = Allocator(is_expandable=True)
    allocator.allocate(20 * MIB_BYTES)
    middle = allocator.allocate(40 * MIB_BYTES)
    allocator.allocate(20 * MIB_BYTES)
    allocator.release(middle)
    allocator.empty_cache()
    assert _reserved_mib(allocator) == 40
    assert allocator.address(allocator.allocate(30 * MIB_BYTES)) == allocator.address(middle)
    assert _reserved_mib(allocator) == 80
