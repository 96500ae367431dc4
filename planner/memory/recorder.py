"""Records what a replay asks of the allocator, as a program that is then served at once.

What an engine and a model ask for depends on no address and on no block, so it is known before
anything is served: keys and tensors have numbered slots, and the program says which to fill and
which to empty, with how many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.memory import execution
from planner.memory.blocks import (
    ADDRESS,
    ALLOCATED,
    BLOCK_WIDTH,
    CLASS_WIDTH,
    END_WIDTH,
    NOTHING,
    NUM_COUNTS,
    NUM_EVENTS,
    OUT_OF_MEMORY,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    POOL_WIDTH,
    RESERVED,
    RETRIES,
    ROUNDING_BYTES,
    SIZE,
    STATUS,
    TABLES_FULL,
    Heap,
)
from planner.memory.compiled import compiled_serve
from planner.memory.execution import EVENT_WIDTH, OPERATION_WIDTH, Requests

Integers = npt.NDArray[np.int64]
# Blocks that most plans have room with; a plan that needs more is served anew with four times these.
_ROOM = 4096
# A few programs are served sooner by Python than by compiled code that has to be loaded first; the
# next one begins to load it, beside what is served until then.
_NUM_INTERPRETED = 3
_num_served = count()
_compiled: list[Callable[..., None]] = []


class ReplayedOutOfMemoryError(Exception):
    """A segment that the capacity has no room for, even with all cached segments given back."""


class Block(NamedTuple):
    """What is in a slot: a tensor of so many bytes, rounded up; its block may be a little larger."""

    slot: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a program: bytes after it and at the most, and where tensors are.

    `num_retries` counts how often all cached segments had to be given back for a new one. `events`
    are rows of (operation, request or -1, slot, bytes of the block taken or given back, reserved
    bytes by then), where they were asked for.
    """

    heap: Heap
    held: Sequence[int]
    events: Integers

    def _count(self, number: int) -> int:
        return int(self.heap.counts[number])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks with a tensor."""
        return self._count(ALLOCATED)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return self._count(RESERVED)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes allocated in the last step."""
        return self._count(PEAK_ALLOCATED)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes reserved."""
        return self._count(PEAK_RESERVED)

    @property
    def num_retries(self) -> int:
        """How often all cached segments were given back."""
        return self._count(RETRIES)

    def block(self, slot: int) -> tuple[int, int]:
        """Address and bytes of the block that a slot holds."""
        row = self.held[slot] * BLOCK_WIDTH
        return int(self.heap.blocks[row + ADDRESS]), int(self.heap.blocks[row + SIZE])


class Recorder:
    """The program of a replay: `operations` as in `execution`, four numbers each."""

    def __init__(self, capacity_bytes: int | None = None, is_expandable: bool = False) -> None:
        self.operations: list[int] = []
        self._capacity_bytes, self._is_expandable = capacity_bytes, is_expandable
        self._num_slots, self._num_streams = 0, 1
        self._num_before = 0
        self._requests: list[tuple[Integers, Integers, Integers]] = []

    @property
    def num_operations(self) -> int:
        """How many operations there are so far."""
        return len(self.operations) // OPERATION_WIDTH

    def new_slots(self, count: int) -> int:
        """The first of so many new slots."""
        first = self._num_slots
        self._num_slots += count
        return first

    def record(self, operation: int, slot: int, other: int = 0, third: int = 0) -> None:
        """Add an operation."""
        self.operations.extend((operation, slot, other, third))

    def take(self, slot: int, size_bytes: int, stream: int = 0) -> None:
        """Fill a slot with a tensor (of more than 0 bytes), unless it is filled."""
        if stream >= self._num_streams:
            self._num_streams = stream + 1
        size_bytes = -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
        self.operations.extend((execution.TAKE, slot, size_bytes, stream))

    def give(self, slot: int) -> None:
        """Empty a slot, if it is filled."""
        self.operations.extend((execution.GIVE, slot, 0, 0))

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """A tensor in a slot of its own."""
        block = Block(self.new_slots(1), rounded(size_bytes))
        self.take(block.slot, size_bytes, stream)
        return block

    def release(self, block: Block) -> None:
        """Give a tensor back."""
        self.give(block.slot)

    def empty_cache(self) -> None:
        """Give back all free segments, as `torch.cuda.empty_cache` does, and forget their peak.

        Engines call it before the first step; what they reserved till then a step has no part in.
        """
        self.record(execution.EMPTY_CACHE, 0)

    def moves(self) -> list[tuple[int, int, int]]:
        """Of every move its operation's number, the slot that it fills and the one it empties."""
        rows = np.array(self.operations, dtype=np.int64).reshape(-1, OPERATION_WIDTH)
        numbers = np.flatnonzero(rows[:, 0] == execution.MOVE)
        return [
            (n, slot, other)
            for n, (_, slot, other, _) in zip(numbers.tolist(), rows[numbers].tolist(), strict=True)
        ]

    def begin_steps(self) -> None:
        """What was recorded so far comes before the steps, and is served once."""
        self._num_before = self.num_operations

    def add_requests(self, slots: Integers, kinds: Integers, sizes: Integers) -> int:
        """Add requests that can be served (see `execution.Requests`); the number of their first."""
        first = sum(len(slots) for slots, _, _ in self._requests)
        num_kinds = sum(len(sizes) for _, _, sizes in self._requests)
        if num_kinds:
            kinds = np.where(kinds >= 0, kinds + num_kinds, kinds)
        self._requests.append((slots, kinds, sizes))
        return first

    def serve(self, repeats: int = 1, with_events: bool = False) -> Served:
        """Serve the program, its steps `repeats` times.

        Raises ReplayedOutOfMemoryError where segments do not fit in the capacity.
        """
        room, status = _ROOM, TABLES_FULL
        while status == TABLES_FULL:
            served = self._serve(room, repeats, with_events)
            status = served.heap.counts[STATUS]
            room *= 4
        if status == OUT_OF_MEMORY:
            raise ReplayedOutOfMemoryError
        return served

    def _serve(self, room: int, repeats: int, with_events: bool) -> Served:
        """Serve the program by compiled code, or as Python runs it, which takes longer."""
        if not _compiled and next(_num_served) == _NUM_INTERPRETED:
            Thread(target=load_compiled).start()
        serve = _compiled[0] if _compiled else execution.serve
        return self._serve_by(serve, bool(_compiled), room, repeats, with_events)

    def _serve_by(
        self,
        serve: Callable[..., None],
        is_compiled: bool,
        room: int,
        repeats: int,
        with_events: bool,
    ) -> Served:
        table: Callable[[Integers], Any] = _as_it_is if is_compiled else _as_list
        operations = np.array(self.operations, dtype=np.int64)
        num_events = self._most_events(operations, repeats) if with_events else 0
        heap = Heap(*(table(numbers) for numbers in self._tables(room)))
        requests = Requests(*(table(numbers) for numbers in self._all_requests()))
        held = table(np.full(self._num_slots, NOTHING, dtype=np.int64))
        events = table(np.empty(num_events * EVENT_WIDTH, dtype=np.int64))
        capacity = NOTHING if self._capacity_bytes is None else self._capacity_bytes
        serve(
            *(heap, requests, table(operations), self._num_before, repeats, held, events),
            *(capacity, self._is_expandable),
        )
        noted = np.asarray(events, dtype=np.int64).reshape(-1, EVENT_WIDTH)
        return Served(heap, held, noted[: heap.counts[NUM_EVENTS]])

    def _tables(self, room: int) -> list[Integers]:
        num_pools = 2 * self._num_streams
        rows = BLOCK_WIDTH, CLASS_WIDTH, 2, num_pools
        sizes = [*(width * room for width in rows), num_pools * POOL_WIDTH, room * END_WIDTH]
        return [np.empty(size, dtype=np.int64) for size in (*sizes, NUM_COUNTS)]

    def _all_requests(self) -> Requests:
        if len(self._requests) == 1:
            slots, kinds, sizes = self._requests[0]
        else:
            nothing = np.empty(0, dtype=np.int64)
            columns = zip((nothing, nothing, nothing), *self._requests, strict=True)
            slots, kinds, sizes = (np.concatenate(column) for column in columns)
        return Requests(slots, kinds, sizes, np.empty_like(sizes))

    def _most_events(self, operations: Integers, repeats: int) -> int:
        rows = operations.reshape(-1, OPERATION_WIDTH)
        served = rows[:, 0] == execution.SERVE
        counts = np.where(served, rows[:, 2] - rows[:, 1], 1)
        steps = counts[self._num_before :].sum() * repeats
        return int(counts[: self._num_before].sum() + steps)


def load_compiled() -> None:
    """Serve all programs from now on by compiled code; see `compiled` for how long it takes."""
    if not _compiled:
        serve, small = compiled_serve(), Recorder()
        small.allocate(1)
        small._serve_by(serve, True, _ROOM, repeats=1, with_events=False)
        _compiled.append(serve)


def rounded(size_bytes: int) -> int:
    """The size of the block that a tensor of `size_bytes` asks for."""
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def _as_it_is(numbers: Integers) -> Any:
    return numbers


def _as_list(numbers: Integers) -> Any:
    return numbers.tolist()
