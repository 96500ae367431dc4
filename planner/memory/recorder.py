"""Records what a replay asks of the allocator, as a program that is then served at once.

What an engine and a model ask for depends on no address and on no block, so it is known before
anything is served: keys and tensors have numbered slots, and the program says which to fill and
which to empty, with how many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
# Where an operation that takes memory has its bytes.
_SIZE_AT = 2
# Blocks that most plans have room with; a plan that needs more is served anew with four times these.
_ROOM = 4096
# A few programs are served sooner by Python than by compiled code that has to be loaded first; the
# next one begins to load it, beside what is served until then.
_NUM_INTERPRETED = 3
_num_served = count()
_compiled: list[Callable[..., None]] = []
_why_interpreted: list[str] = []


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


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What a replay asks for: `operations` as in `execution`, all behind `num_before` a step's.

    Request i is for slot `slots[i]`, of kind `kinds[i]`. At `sized_at` in the operations are bytes
    that follow from a micro-batch's rows and their length, `sized` is what they are for.
    """

    operations: Integers
    num_before: int
    num_slots: int
    num_streams: int
    slots: Integers
    kinds: Integers
    sized_at: Integers
    sized: tuple[Any, ...]

    def with_sizes(self, sizes_bytes: Mapping[Any, int]) -> Program:
        """The program of other rows or another length; `sizes_bytes` by what they are for."""
        operations = self.operations.copy()
        taken_bytes = np.array([sizes_bytes[name] for name in self.sized], dtype=np.int64)
        operations[self.sized_at] = -(-taken_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
        return replace(self, operations=operations)

    def serve(
        self,
        sizes: Integers,
        repeats: int = 1,
        capacity_bytes: int | None = None,
        is_expandable: bool = False,
        with_events: bool = False,
    ) -> Served:
        """Serve the program, its steps `repeats` times; `sizes` are the rounded bytes of each kind.

        Raises ReplayedOutOfMemoryError where segments do not fit in the capacity.
        """
        capacity = NOTHING if capacity_bytes is None else capacity_bytes
        how = repeats, capacity, is_expandable, with_events, _compiled_or_none()
        room, status = _ROOM, TABLES_FULL
        while status == TABLES_FULL:
            served = self._serve(sizes, room, *how)
            status = served.heap.counts[STATUS]
            room *= 4
        if status == OUT_OF_MEMORY:
            raise ReplayedOutOfMemoryError
        return served

    def _serve(
        self,
        sizes: Integers,
        room: int,
        repeats: int,
        capacity: int,
        is_expandable: bool,
        with_events: bool,
        serve: Callable[..., None] | None,
    ) -> Served:
        """Serve by compiled code, or without it as Python runs it, which takes longer."""
        table: Callable[[Integers], Any] = _as_list if serve is None else _as_it_is
        num_events = self._most_events(repeats) if with_events else 0
        heap = Heap(*(table(numbers) for numbers in self._tables(room)))
        columns = self.slots, self.kinds, sizes, np.empty_like(sizes)
        requests = Requests(*(table(numbers) for numbers in columns))
        held = table(np.full(self.num_slots, NOTHING, dtype=np.int64))
        events = table(np.empty(num_events * EVENT_WIDTH, dtype=np.int64))
        (serve or execution.serve)(
            *(heap, requests, table(self.operations), self.num_before, repeats, held, events),
            *(capacity, is_expandable),
        )
        noted = np.asarray(events, dtype=np.int64).reshape(-1, EVENT_WIDTH)
        return Served(heap, held, noted[: heap.counts[NUM_EVENTS]])

    def _tables(self, room: int) -> list[Integers]:
        num_pools = 2 * self.num_streams
        rows = BLOCK_WIDTH, CLASS_WIDTH, 2, num_pools
        sizes = [*(width * room for width in rows), num_pools * POOL_WIDTH, room * END_WIDTH]
        return [np.empty(size, dtype=np.int64) for size in (*sizes, NUM_COUNTS)]

    def _most_events(self, repeats: int) -> int:
        rows = self.operations.reshape(-1, OPERATION_WIDTH)
        served = rows[:, 0] == execution.SERVE
        counts = np.where(served, rows[:, 2] - rows[:, 1], 1)
        steps = counts[self.num_before :].sum() * repeats
        return int(counts[: self.num_before].sum() + steps)


class Recorder:
    """The program of a replay: `operations` as in `execution`, four numbers each."""

    def __init__(self, capacity_bytes: int | None = None, is_expandable: bool = False) -> None:
        self.operations: list[int] = []
        self._capacity_bytes, self._is_expandable = capacity_bytes, is_expandable
        self._num_slots, self._num_streams = 0, 1
        self._num_before = 0
        self._requests: list[tuple[Integers, Integers, Integers]] = []
        self._sized: list[tuple[int, Any]] = []

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

    def take_of_batch(self, slot: int, size_bytes: int, name: Any) -> None:
        """Fill a slot as `take` does, with what follows from a micro-batch's rows and length."""
        self._sized.append((len(self.operations) + _SIZE_AT, name))
        self.take(slot, size_bytes)

    def program(self) -> Program:
        """All that was recorded, but for the sizes of requests."""
        nothing = np.empty(0, dtype=np.int64)
        return Program(
            operations=np.array(self.operations, dtype=np.int64),
            num_before=self._num_before,
            num_slots=self._num_slots,
            num_streams=self._num_streams,
            slots=np.concatenate([nothing, *(slots for slots, _, _ in self._requests)]),
            kinds=np.concatenate([nothing, *(kinds for _, kinds, _ in self._requests)]),
            sized_at=np.array([number for number, _ in self._sized], dtype=np.int64),
            sized=tuple(name for _, name in self._sized),
        )

    def serve(self, repeats: int = 1, with_events: bool = False) -> Served:
        """Serve what was recorded; see `Program.serve`."""
        nothing = np.empty(0, dtype=np.int64)
        sizes = np.concatenate([nothing, *(sizes for _, _, sizes in self._requests)])
        memory = self._capacity_bytes, self._is_expandable
        return self.program().serve(sizes, repeats, *memory, with_events=with_events)


def _compiled_or_none() -> Callable[..., None] | None:
    """The compiled code, if it is loaded; it is begun to be when it starts to be worth it."""
    if not _compiled and next(_num_served) == _NUM_INTERPRETED:
        begin_to_load()
    return _compiled[0] if _compiled else None


def load_compiled() -> None:
    """Serve all programs from now on by compiled code; see `compiled` for how long it takes.

    Raises whatever keeps numba from being loaded or from compiling.
    """
    if not _compiled:
        serve, small = compiled_serve(), Recorder()
        small.allocate(1)
        nothing = np.empty(0, dtype=np.int64)
        small.program()._serve(nothing, _ROOM, 1, NOTHING, False, False, serve)
        _compiled.append(serve)


def begin_to_load() -> Thread:
    """Load the compiled code beside what goes on, as a server does at its start; return the thread."""
    thread = Thread(target=_load_or_say_why)
    thread.start()
    return thread


def _load_or_say_why() -> None:
    try:
        load_compiled()
    except Exception as error:  # whatever a broken numba or LLVM raises: Python's form is as right
        _why_interpreted.append(f"{type(error).__name__}: {error}")


def how_served() -> str:
    """Say what serves programs: compiled code, or Python and why; results are the same."""
    if _compiled:
        return "compiled by numba"
    if _why_interpreted:
        return f"run by Python: numba could not compile it ({_why_interpreted[0]})"
    return "run by Python until compiled code is loaded"


def rounded(size_bytes: int) -> int:
    """The size of the block that a tensor of `size_bytes` asks for."""
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def _as_it_is(numbers: Integers) -> Any:
    return numbers


def _as_list(numbers: Integers) -> Any:
    return numbers.tolist()
