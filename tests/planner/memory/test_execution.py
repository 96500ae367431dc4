"""Programs of every kind: interpreted and compiled, against a second account of the allocator."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import numpy as np
import pytest

from planner.memory import recorder as recording
from planner.memory.execution import FORGET, MOVE, SERVE, TAKE_LIKE
from planner.memory.recorder import Recorder, ReplayedOutOfMemoryError, Served, rounded
from planner.units import MIB_BYTES
from tests.planner.memory.reference import CachingAllocator, ExpandableAllocator

SIZES = (1, 512, 8192, 700_000, MIB_BYTES, 3 * MIB_BYTES, 9 * MIB_BYTES, 33 * MIB_BYTES, 45_000_000)
NUM_SLOTS = 60
NO_REQUEST = -1


@pytest.fixture(params=["interpreted", "compiled"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of one source."""
    recording.load_compiled()
    if request.param == "interpreted":
        monkeypatch.setattr(recording, "_compiled", [])
        monkeypatch.setattr(recording, "_NUM_INTERPRETED", -1)


class Both:
    """A program as it is recorded, and the second account of it, which is served at once."""

    def __init__(self, capacity_bytes: int | None, is_expandable: bool) -> None:
        kind = ExpandableAllocator if is_expandable else CachingAllocator
        self.recorder, self.reference = (
            Recorder(capacity_bytes, is_expandable),
            kind(capacity_bytes),
        )
        self.held: dict[int, Any] = {}
        self.slots = self.recorder.new_slots(NUM_SLOTS)

    def take(self, slot: int, size_bytes: int, stream: int) -> None:
        self.recorder.take(slot, size_bytes, stream)
        if slot not in self.held:
            self.held[slot] = self.reference.allocate(size_bytes, stream)

    def give(self, slot: int) -> None:
        self.recorder.give(slot)
        if slot in self.held:
            self.reference.release(self.held.pop(slot))

    def move(self, slot: int, other: int) -> None:
        self.recorder.record(MOVE, slot, other)
        self.held[slot] = self.held.pop(other)

    def take_like(self, slot: int, other: int) -> None:
        self.recorder.record(TAKE_LIKE, slot, other)
        self.held[slot] = self.reference.allocate(self.held[other].size_bytes)

    def empty_cache(self) -> None:
        self.recorder.empty_cache()
        self.reference.empty_cache()

    def step(self, source: random.Random) -> None:
        """One operation, chosen by chance."""
        slot, other = source.randrange(NUM_SLOTS), source.randrange(NUM_SLOTS)
        size_bytes = source.choice(SIZES) + source.choice((0, 0, 5000, MIB_BYTES))
        chance = source.random()
        if chance < 0.03 and other in self.held and slot not in self.held:
            self.move(slot, other)
        elif chance < 0.06 and other in self.held and slot not in self.held:
            self.take_like(slot, other)
        elif chance < 0.065:
            self.empty_cache()
        elif chance < 0.55:
            self.take(slot, size_bytes, source.randrange(3))
        else:
            self.give(slot)

    def compare(self, served: Served) -> None:
        """Every number, and where every tensor is; ranges of addresses have other beginnings."""
        reference = self.reference
        names = ("allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "num_retries")
        for name in (*names, "peak_allocated_bytes"):
            assert getattr(served, name) == getattr(reference, name), name
        blocks = {slot: served.block(slot) for slot in self.held}
        assert {s: size for s, (_, size) in blocks.items()} == {
            slot: block.size_bytes for slot, block in self.held.items()
        }
        if not isinstance(reference, ExpandableAllocator):
            assert {s: address for s, (address, _) in blocks.items()} == {
                slot: block.address for slot, block in self.held.items()
            }


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize("capacity_mib", [None, 700])
def test_random_programs_come_out_as_in_the_second_account(
    is_expandable: bool, capacity_mib: int | None
) -> None:
    capacity_bytes = capacity_mib and capacity_mib * MIB_BYTES
    num_short = num_retries = 0
    for seed in range(25):
        source, both = random.Random(seed), Both(capacity_bytes, is_expandable)
        try:
            for _ in range(1200):
                both.step(source)
        except ReplayedOutOfMemoryError:
            num_short += 1
            with pytest.raises(ReplayedOutOfMemoryError):
                both.recorder.serve()
            continue
        served = both.recorder.serve()
        both.compare(served)
        num_retries += served.num_retries
    if capacity_mib:
        assert num_short or num_retries, "no program came near the capacity"


@pytest.mark.usefixtures("form")
def test_blocks_never_overlap_and_all_memory_can_be_given_back() -> None:
    for seed, is_expandable in itertools.product(range(5), (False, True)):
        source, both = random.Random(seed), Both(None, is_expandable)
        for _ in range(1500):
            both.step(source)
        served = both.recorder.serve()
        spans = sorted(served.block(slot) for slot in both.held)
        ends = [address + size for address, size in spans]
        assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
        assert sum(size for _, size in spans) == served.allocated_bytes <= served.reserved_bytes
        for slot in range(NUM_SLOTS):
            both.recorder.give(slot)
        both.recorder.empty_cache()
        served = both.recorder.serve()
        assert (served.allocated_bytes, served.reserved_bytes) == (0, 0)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("is_expandable", [False, True])
def test_requests_of_sections_are_served_like_operations(is_expandable: bool) -> None:
    source = random.Random(3)
    kinds = [rounded(size) for size in SIZES] + [0]
    together, apart = Recorder(None, is_expandable), Recorder(None, is_expandable)
    slots, chosen = [], []
    for _ in range(3000):
        slots.append(source.randrange(400))
        chosen.append(source.choice([*range(len(kinds)), *[NO_REQUEST] * len(kinds)]))
    base, own = together.new_slots(400), apart.new_slots(400)
    first = together.add_requests(*(np.array(numbers) for numbers in (slots, chosen, kinds)))
    together.record(SERVE, first, first + 3000, base)
    for slot, kind in zip(slots, chosen, strict=True):
        if kind == NO_REQUEST:
            apart.give(own + slot)
        elif kinds[kind]:
            # Unlike an engine's, a section's tensor takes the place of one that is there.
            apart.record(FORGET, own + slot, 1)
            apart.take(own + slot, kinds[kind])
    one, other = together.serve(with_events=True), apart.serve(with_events=True)
    assert one.peak_allocated_bytes == other.peak_allocated_bytes
    assert one.reserved_bytes == other.reserved_bytes
    assert one.events[:, 2:].tolist() == other.events[:, 2:].tolist()


@pytest.mark.usefixtures("form")
def test_a_program_that_outgrows_its_tables_is_served_anew() -> None:
    recorder, slots = Recorder(), 6000
    first = recorder.new_slots(slots)
    for slot in range(slots):
        recorder.take(first + slot, 30 * MIB_BYTES)
    # Every other one is given back: 3,000 free blocks, each with a tensor in the rest.
    for slot in range(0, slots, 2):
        recorder.give(first + slot)
    served = recorder.serve()
    assert served.reserved_bytes == slots * 30 * MIB_BYTES
    assert served.allocated_bytes == slots // 2 * 30 * MIB_BYTES


@pytest.mark.usefixtures("form")
def test_steps_are_served_as_often_as_they_are_repeated() -> None:
    recorder = Recorder()
    kept, step = recorder.new_slots(1), recorder.new_slots(1)
    recorder.take(kept, 20 * MIB_BYTES)
    recorder.begin_steps()
    recorder.take(kept, 20 * MIB_BYTES)  # held already
    recorder.record(FORGET, step, 1)
    recorder.take(step, 20 * MIB_BYTES)  # what held it is never given back
    assert recorder.serve(repeats=1).allocated_bytes == 40 * MIB_BYTES
    assert recorder.serve(repeats=3).allocated_bytes == 80 * MIB_BYTES


@pytest.mark.usefixtures("form")
def test_a_search_passes_many_sizes_without_a_block() -> None:
    """60 sizes have lost their blocks as a larger one is asked for, then some have one again."""
    both = Both(None, False)
    for slot in range(NUM_SLOTS):
        both.take(slot, (2 * slot + 1) * 512, 0)
    for slot in range(0, NUM_SLOTS, 2):
        both.give(slot)
    for slot in range(0, NUM_SLOTS, 2):
        both.take(slot, (2 * slot + 1) * 512, 0)
    for slot in (*range(1, NUM_SLOTS, 2), *range(0, NUM_SLOTS, 4)):
        both.give(slot)
    both.take(1, 512, 0)
    both.take(3, 90 * 512, 0)
    both.compare(both.recorder.serve())


def test_sizes_that_follow_from_the_batch_can_be_others() -> None:
    recorder = Recorder()
    fixed, tokens = recorder.new_slots(1), recorder.new_slots(1)
    recorder.take(fixed, 1000)
    recorder.take_of_batch(tokens, 700, "tokens")
    nothing = np.empty(0, dtype=np.int64)
    program = recorder.program()
    # 1,000 and 700 bytes are two blocks of 512 each; 1,025 are three.
    assert program.serve(nothing).allocated_bytes == 4 * 512
    assert program.with_sizes({"tokens": 1025}).serve(nothing).allocated_bytes == 5 * 512
    assert program.serve(nothing).allocated_bytes == 4 * 512


def test_a_server_loads_the_compiled_code_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_compiled", [])
    recording.begin_to_load().join(timeout=120)
    assert recording.how_served() == "compiled by numba"


def test_where_numba_is_broken_python_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ImportError("no LLVM here")

    monkeypatch.setattr(recording, "_compiled", [])
    monkeypatch.setattr(recording, "_why_interpreted", [])
    monkeypatch.setattr(recording, "_num_served", itertools.count())
    monkeypatch.setattr(recording, "_NUM_INTERPRETED", 0)
    monkeypatch.setattr(recording, "compiled_serve", broken)
    assert recording.how_served() == "run by Python until compiled code is loaded"
    recorder = Recorder()
    recorder.allocate(MIB_BYTES)
    assert recorder.serve().allocated_bytes == MIB_BYTES
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(timeout=10)
    assert recording.how_served().endswith("could not compile it (ImportError: no LLVM here)")
    assert recorder.serve().allocated_bytes == MIB_BYTES
    assert capfd.readouterr().err == ""
