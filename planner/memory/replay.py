"""Replay whole training steps through the caching allocator: allocated and reserved, to the block.

The traced requests of each section run layer by layer between the engine's own allocations. Three
steps are run at most: optimizer states appear in the first, and from the third on nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from planner.memory.execution import BEGIN_STEP, FORGET, MOVE, SERVE, TAKE_LIKE
from planner.memory.recorder import Block, Recorder, Served
from planner.memory.requests import (
    ATTENTION_GRADIENTS,
    EMBEDDING_GRADIENT,
    EMBEDDING_KERNEL,
    FIRST_PRODUCT,
    GRADIENT,
    HEAD_GRADIENT,
    LOSS_IS_BEHIND,
    NO_CUT,
    Integers,
    Layout,
    Section,
    lay_out,
    rounded_sizes,
)
from planner.memory.sections import COMPONENTS, FLAT_GROUPS, StepSequence
from planner.memory.templates import monomial_values
from planner.model import ModelSpec

NUM_STEPS = 3
TILE_LIST, EMBEDDING = "tile list", "embedding"
Blocks = list[Block]


class Memory:
    """Records what is taken from a caching allocator and given back to it, under keys."""

    def __init__(self, capacity_bytes: int | None = None, expandable: bool = False) -> None:
        self.allocator = Recorder(capacity_bytes, expandable)
        self._slots: dict[Any, int] = {}
        self._held: set[Any] = set()

    def take(self, key: Any, size_bytes: int, stream: int = 0) -> None:
        """Allocate under `key`, unless it is held already or there is nothing to hold."""
        if size_bytes > 0 and key not in self._held:
            self._held.add(key)
            self.allocator.take(self._slot(key), size_bytes, stream)

    def take_of_batch(self, key: str, size_bytes: int) -> None:
        """Allocate as `take` does what follows from a micro-batch's rows and their length."""
        if size_bytes > 0 and key not in self._held:
            self._held.add(key)
            self.allocator.take_of_batch(self._slot(key), size_bytes, key)

    def _slot(self, key: Any) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self.allocator.new_slots(1)
        return slot

    def give(self, *keys: Any) -> None:
        """Release what is held under each key."""
        for key in keys:
            if key in self._held:
                self._held.remove(key)
                self.allocator.give(self._slots[key])

    def holds(self, key: Any) -> bool:
        """Whether something is held under `key`."""
        return key in self._held


class EngineReplay(Protocol):
    """An engine's own allocations around the sections of a step."""

    repeats: bool
    """Whether every step asks for the same, but for what it finds held already."""

    @property
    def repeats_from(self) -> int:
        """How many micro-batches of a step stand for any more: more find what these found."""

    def start(self) -> None:
        """Build: parameters and what stays."""

    def start_micro_batch(self, is_last: bool) -> None:
        """Say whether the micro-batch that begins is the step's last."""

    def before(self, section: str, layer: int) -> None:
        """Gather what the section needs."""

    def after_embedding(self) -> None:
        """The forward of the embedding is over, and with it what comes before the first layer."""

    def first_gradient(self, group: int, layer: int) -> None:
        """A parameter group's first gradient has arrived (an index of FLAT_GROUPS)."""

    def last_gradient(self, group: int, layer: int) -> None:
        """A parameter group's last gradient has been added."""

    def keeps(self, gradient: Any) -> bool:
        """Whether the engine holds on to the block of a vocabulary-sized weight's gradient."""

    follows_gradients: bool
    """Whether it is told of every gradient that is released where it was made."""

    def gradient(self, size_bytes: int) -> None:
        """A gradient is whole, and released next."""

    def before_backward_product(self) -> None:
        """The first matrix product of a backward is next: the loss is behind."""

    def first_backward_product(self) -> None:
        """The first matrix product of a backward has its result."""

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Reduce and free; `gradients` are the blocks that autograd left as gradients."""

    def optimizer_step(self) -> None:
        """Step the optimizer and free the gradients."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Peak of the last step, and the most that segments held, in bytes.

    `num_retries` counts how often all cached segments had to be given back for a new one.
    """

    allocated_bytes: int
    reserved_bytes: int
    num_retries: int = 0

    @classmethod
    def of(cls, served: Served) -> Replayed:
        """What became of a program's steps."""
        return cls(served.peak_allocated_bytes, served.peak_reserved_bytes, served.num_retries)


class Requests:
    """A layout with the sizes of one plan: of each kind its bytes, and as they are rounded."""

    def __init__(
        self, monomials: tuple[str, ...], layout: Layout, kinds: Integers, sizes_bytes: Integers
    ) -> None:
        self.monomials, self.layout = monomials, layout
        self.kinds, self.sizes_bytes = kinds, sizes_bytes
        self.rounded = rounded_sizes(sizes_bytes)

    def tensor(self, request: int) -> tuple[int, int]:
        """Slot and rounded bytes of a request's tensor."""
        kind = int(self.kinds[request])
        return int(self.layout.slots[request]), int(self.rounded[kind])

    def size_of(self, release: int) -> int:
        """The bytes of the tensor that request number `release` releases."""
        made = self._first_of_slot[self.layout.slots[release]]
        return int(self.sizes_bytes[self.kinds[made]])

    @cached_property
    def _first_of_slot(self) -> Integers:
        """Of every slot the first request, which fills it."""
        slots = self.layout.slots
        first = np.zeros(self.layout.num_slots, dtype=np.int64)
        first[slots[::-1]] = np.arange(len(slots))[::-1]  # the last written stays
        return first


def kind_sizes_bytes(
    spec: ModelSpec,
    monomials: tuple[str, ...],
    layout: Layout,
    micro_batch: int,
    sequence_length: int,
    lora_rank: int,
) -> Integers:
    """The bytes of each kind of a layout's requests."""
    values = monomial_values(spec, monomials, micro_batch, sequence_length, lora_rank)
    return layout.sizes_bytes(np.rint(values * 2).astype(np.int64))


class ModelReplay:
    """Runs the traced sections of one model, layer by layer."""

    def __init__(
        self,
        spec: ModelSpec,
        sequence: StepSequence,
        memory: Memory,
        engine: EngineReplay,
        micro_batch: int,
        sequence_length: int,
        sums_in_place: bool,
        later_steps: StepSequence | None = None,
        lora_rank: int = 0,
        attention_workspaces: Sequence[Sequence[int]] = (),
        tile_list_bytes: int = 0,
        embedding_buffers: Sequence[int] = (),
    ) -> None:
        """`later_steps`: of micro-batches that find gradients where the first found none.

        For the last three see `planner.memory.attention` and `planner.memory.partial_sums`.
        """
        self._engine, self._allocator = engine, memory.allocator
        self._memory, self._tile_list_bytes = memory, tile_list_bytes
        self._attention_workspaces = attention_workspaces
        self._embedding_buffers = embedding_buffers
        self._sums_in_place = sums_in_place
        self._sizes = micro_batch, sequence_length, lora_rank
        # Autograd holds the head's share of a tied weight until the embedding's has been added.
        self._is_tied = spec.tie_word_embeddings
        self._tied_block = Block(memory.allocator.new_slots(1), 0)
        self._first = self._later = self._requests_of(spec, sequence)
        self._starts = {self._first: self._added(self._first)}
        if later_steps:
            self._later = self._requests_of(spec, later_steps)
            self._starts[self._later] = self._added(self._later)
        # Where the slots of each micro-batch begin, and what an engine has taken out of them.
        self._slots_of: dict[int, int] = {}
        self._taken: set[int] = set()
        self._requests, self._first_slot = self._first, 0

    def _added(self, requests: Requests) -> int:
        return self._allocator.add_requests(requests.layout.slots, requests.kinds, requests.rounded)

    def layouts(self) -> tuple[tuple[tuple[str, ...], Layout], ...]:
        """Monomials and layout of every micro-batch that differs from the others."""
        return tuple((requests.monomials, requests.layout) for requests in self._starts)

    def tensors(self) -> list[tuple[str, int]]:
        """Component and bytes of every request's tensor, as it was asked for."""
        found: list[tuple[str, int]] = []
        for requests in self._starts:
            sizes = requests.sizes_bytes[requests.kinds].tolist()
            names = [COMPONENTS[number] for number in requests.layout.components.tolist()]
            found += zip(names, sizes, strict=True)
        return found

    def _requests_of(self, spec: ModelSpec, sequence: StepSequence) -> Requests:
        monomials, has_workspace = sequence.steps.monomials, any(self._attention_workspaces)
        layout = lay_out(sequence, self._engine.follows_gradients, has_workspace)
        sizes_bytes = kind_sizes_bytes(spec, monomials, layout, *self._sizes)
        return Requests(monomials, layout, self._kinds(spec, layout), sizes_bytes)

    def _kinds(self, spec: ModelSpec, layout: Layout) -> Integers:
        """The kind of each request."""
        head = layout.request_of.get(HEAD_GRADIENT)
        if not self._is_tied or EMBEDDING_GRADIENT in layout.request_of or head is None:
            return layout.kinds
        # A head tied to a frozen embedding is frozen too: it has no gradient.
        kinds = layout.kinds.copy()
        kinds[head] = layout.no_tensor
        return kinds

    def micro_batch(self, index: int, is_last: bool) -> None:
        """Run forward and backward of a step's micro-batch `index`; the last one may reduce for all."""
        self._begin(index, self._later if index else self._first)
        self._engine.start_micro_batch(is_last)
        self._run(self._requests.layout.forward)
        self._run(self._requests.layout.backward)

    def _begin(self, index: int, requests: Requests) -> None:
        """Let the micro-batch have slots with nothing in them."""
        most = max(requests.layout.num_slots for requests in self._starts)
        if index not in self._slots_of:
            self._slots_of[index] = self._allocator.new_slots(most)
        self._requests, self._first_slot = requests, self._slots_of[index]
        self._taken.clear()
        self._allocator.record(FORGET, self._first_slot, most)

    def _run(self, sections: Sequence[Section]) -> None:
        engine, record, start = self._engine, self._allocator.record, self._starts[self._requests]
        first_slot = self._first_slot
        for section in sections:
            name, layer = section.place
            engine.before(name, layer)
            if name == "layer":
                self._memory.take_of_batch(TILE_LIST, self._tile_list_bytes)
            for first, end, cut in section.stretches:
                if first < end:
                    record(SERVE, start + first, start + end, first_slot)
                if cut == GRADIENT:
                    self._tell_of_gradient(end)
                elif cut == ATTENTION_GRADIENTS:
                    self._pass_buffers(layer, self._attention_workspaces[layer])
                elif cut == EMBEDDING_KERNEL:
                    self._pass_buffers(EMBEDDING, self._embedding_buffers)
                elif cut != NO_CUT:
                    self._stop_at(cut, section)
            gradients = [self._tensor(request) for request in section.gradients]
            engine.after(name, layer, [block for block in gradients if block is not None])
            if name == "embed":
                engine.after_embedding()

    def _pass_buffers(self, of: int | str, sizes_bytes: Sequence[int]) -> None:
        """Take what a kernel holds while it runs, and give it back."""
        allocator, slots = self._allocator, []
        for number, size_bytes in enumerate(sizes_bytes):
            slots.append(allocator.new_slots(1))
            allocator.take_of_batch(slots[-1], size_bytes, (of, number))
        for slot in slots:
            allocator.give(slot)

    def _tensor(self, request: int) -> Block | None:
        """What a request took, if it took something that is still there."""
        slot, size_bytes = self._requests.tensor(request)
        slot += self._first_slot
        return Block(slot, size_bytes) if size_bytes and slot not in self._taken else None

    def _tensor_at(self, cut: int) -> Block | None:
        return self._tensor(self._requests.layout.request_of[cut])

    def _tell_of_gradient(self, release: int) -> None:
        layout = self._requests.layout
        head = layout.request_of.get(HEAD_GRADIENT)
        is_share = head is not None and layout.slots[head] == layout.slots[release]
        if not (is_share and self._is_tied):
            self._engine.gradient(self._requests.size_of(release))

    def _stop_at(self, cut: int, section: Section) -> None:
        name, layer = section.place
        if cut < len(FLAT_GROUPS):
            if not self._is_tied or name != "loss_backward":
                self._engine.first_gradient(cut, layer)
        elif cut == LOSS_IS_BEHIND:
            self._engine.before_backward_product()
        elif cut == FIRST_PRODUCT:
            self._engine.first_backward_product()
        elif cut == HEAD_GRADIENT:
            if self._is_tied:
                self._hold_tied()
            else:
                self._offer(cut)
        elif cut == EMBEDDING_GRADIENT:
            self._join_tied()
            self._offer(cut)
        else:
            self._engine.last_gradient(cut - len(FLAT_GROUPS), layer)

    def _offer(self, cut: int) -> None:
        block = self._tensor_at(cut)
        if block is None:
            return
        own = Block(self._allocator.new_slots(1), block.size_bytes)
        if self._engine.keeps(own):
            self._move(block, own)

    def _move(self, block: Block, to: Block) -> None:
        self._allocator.record(MOVE, to.slot, block.slot)
        self._taken.add(block.slot)

    def _hold_tied(self) -> None:
        head_share = self._tensor_at(HEAD_GRADIENT)
        if head_share is not None:
            self._move(head_share, self._tied_block)

    def _join_tied(self) -> None:
        """Once the embedding's share exists both are summed, and what is left over is freed.

        Into the head's share where that is the result of autocast's cast; where it is the view that
        a product's backward gives, autograd makes a third tensor (read from allocator snapshots on
        an H200, torch 2.11; torch/csrc/autograd/input_buffer.cpp, accumulate).
        """
        layout, allocator = self._requests.layout, self._allocator
        head = layout.request_of.get(HEAD_GRADIENT)
        embedding_share = self._tensor_at(EMBEDDING_GRADIENT)
        if not self._is_tied or head is None or not self._requests.tensor(head)[1]:
            return
        if embedding_share is None:
            raise ValueError("a tied weight has a gradient of its head and none of its embedding")
        share = Block(allocator.new_slots(1), 0)
        allocator.record(MOVE, share.slot, embedding_share.slot)
        if self._sums_in_place:
            allocator.record(MOVE, embedding_share.slot, self._tied_block.slot)
        else:
            allocator.record(TAKE_LIKE, embedding_share.slot, self._tied_block.slot)
        allocator.release(share)
        allocator.release(self._tied_block)


def record(model: ModelReplay, engine: EngineReplay, memory: Memory, grad_accumulation: int) -> int:
    """Record what building and steps ask for; see `record_steps`."""
    micro_batches = min(grad_accumulation, engine.repeats_from)

    def run_micro_batches() -> None:
        for index in range(micro_batches):
            model.micro_batch(index, is_last=index == micro_batches - 1)

    return record_steps(engine, memory, run_micro_batches)


def record_steps(
    engine: EngineReplay, memory: Memory, run_micro_batches: Callable[[], None]
) -> int:
    """Build, then run steps: NUM_STEPS, or one that is served so often where the engine repeats it.

    Returns how often what was recorded of steps is to be served.
    """
    recorded = 1 if engine.repeats else NUM_STEPS
    engine.start()
    memory.allocator.begin_steps()
    for _ in range(recorded):
        memory.allocator.record(BEGIN_STEP, 0)
        run_micro_batches()
        engine.optimizer_step()
    return NUM_STEPS // recorded


def replayed(memory: Memory, repeats: int) -> Replayed:
    """Serve what was recorded."""
    return Replayed.of(memory.allocator.serve(repeats))
