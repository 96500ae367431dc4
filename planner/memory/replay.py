"""Replay whole training steps through the caching allocator: allocated and reserved, to the block.

The traced requests of each section run layer by layer between the engine's own allocations. Three
steps are run at most: optimizer states appear in the first, and from the third on nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from planner.memory.allocator import CachingAllocator
from planner.memory.expandable import ExpandableAllocator
from planner.memory.requests import (
    EMBEDDING_GRADIENT,
    FIRST_PRODUCT,
    HEAD_GRADIENT,
    LOSS_IS_BEHIND,
    NO_CUT,
    Integers,
    Layout,
    Section,
    lay_out,
    rounded_sizes,
)
from planner.memory.sections import FLAT_GROUPS, StepSequence
from planner.memory.templates import monomial_values
from planner.model import ModelSpec

NUM_STEPS = 3
Blocks = list[Any]


class Memory:
    """A caching allocator whose blocks are held under keys."""

    def __init__(self, capacity_bytes: int | None = None, expandable: bool = False) -> None:
        kind = ExpandableAllocator if expandable else CachingAllocator
        self.allocator = kind(capacity_bytes)
        self._held: dict[Any, Any] = {}

    def take(self, key: Any, size_bytes: int, stream: int = 0) -> None:
        """Allocate under `key`, unless it is held already or there is nothing to hold."""
        if size_bytes > 0 and key not in self._held:
            self._held[key] = self.allocator.allocate(size_bytes, stream)

    def give(self, *keys: Any) -> None:
        """Release what is held under each key."""
        for key in keys:
            block = self._held.pop(key, None)
            if block is not None:
                self.allocator.release(block)

    def holds(self, key: Any) -> bool:
        """Whether something is held under `key`."""
        return key in self._held

    def state(self) -> Any:
        """What is held where, and the allocator's state: steps between equal states are equal."""
        held = {key: (block.address, block.size_bytes) for key, block in self._held.items()}
        return held, self.allocator.state()


class EngineReplay(Protocol):
    """An engine's own allocations around the sections of a step."""

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


class Requests:
    """A layout with the sizes of one plan."""

    def __init__(self, layout: Layout, sizes_bytes: Integers) -> None:
        self.layout, self.sizes_bytes = layout, sizes_bytes
        self.slots: list[int] = layout.slots.tolist()
        self.rounded: list[int] = rounded_sizes(sizes_bytes).tolist()


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
    ) -> None:
        """`later_steps`: of micro-batches that find gradients where the first found none."""
        self._engine, self._allocator = engine, memory.allocator
        self._sums_in_place = sums_in_place
        self._sizes = micro_batch, sequence_length, lora_rank
        # Autograd holds the head's share of a tied weight until the embedding's has been added.
        self._is_tied = spec.tie_word_embeddings
        self._first = self._requests_of(spec, sequence)
        self._later = self._requests_of(spec, later_steps) if later_steps else self._first
        self._requests = self._first
        self._tied_block: Any = None
        self._blocks: Blocks = []

    def _requests_of(self, spec: ModelSpec, sequence: StepSequence) -> Requests:
        values = monomial_values(spec, sequence.steps.monomials, *self._sizes)
        layout = lay_out(sequence)
        return Requests(layout, self._sized(spec, layout, np.rint(values * 2).astype(np.int64)))

    def _sized(self, spec: ModelSpec, layout: Layout, doubled_values: Integers) -> Integers:
        """The sizes of all requests."""
        sizes = layout.sizes_bytes(doubled_values)
        if self._is_tied and EMBEDDING_GRADIENT not in layout.slot_of:
            # A head tied to a frozen embedding is frozen too: it has no gradient.
            slot = layout.slot_of.get(HEAD_GRADIENT)
            sizes[(layout.slots == slot) & (sizes > 0)] = 0
        return sizes

    def micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Run forward and backward once, as the step's first or last micro-batch."""
        self._requests = self._first if is_first else self._later
        layout = self._requests.layout
        self._blocks = [None] * layout.num_slots
        self._engine.start_micro_batch(is_last)
        self._run(layout.forward)
        self._run(layout.backward)

    def _run(self, sections: Sequence[Section]) -> None:
        blocks, engine = self._blocks, self._engine
        for section in sections:
            name, layer = section.place
            engine.before(name, layer)
            for first, end, cut in section.stretches:
                if first < end:
                    self._serve(first, end)
                if cut != NO_CUT:
                    self._stop_at(cut, section)
            gradients = [blocks[slot] for slot in section.gradient_slots]
            engine.after(name, layer, [block for block in gradients if block is not None])
            if name == "embed":
                engine.after_embedding()

    def _serve(self, first: int, end: int) -> None:
        requests = self._requests
        self._allocator.serve(requests.slots[first:end], requests.rounded[first:end], self._blocks)

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
                self._tied_block = self._taken_out(cut)
            else:
                self._offer(cut)
        elif cut == EMBEDDING_GRADIENT:
            self._join_tied()
            self._offer(cut)
        else:
            self._engine.last_gradient(cut - len(FLAT_GROUPS), layer)

    def _offer(self, cut: int) -> None:
        slot = self._requests.layout.slot_of[cut]
        block = self._blocks[slot]
        if block is not None and self._engine.keeps(block):
            self._blocks[slot] = None

    def _taken_out(self, cut: int) -> Any:
        slot = self._requests.layout.slot_of[cut]
        block, self._blocks[slot] = self._blocks[slot], None
        return block

    def _join_tied(self) -> None:
        """Once the embedding's share exists both are summed, and what is left over is freed.

        Into the head's share where that is the result of autocast's cast; where it is the view that
        a product's backward gives, autograd makes a third tensor (read from allocator snapshots on
        an H200, torch 2.11; torch/csrc/autograd/input_buffer.cpp, accumulate).
        """
        head_share, self._tied_block = self._tied_block, None
        if head_share is None:
            return
        embedding_share = self._taken_out(EMBEDDING_GRADIENT)
        if self._sums_in_place:
            total = head_share
        else:
            total = self._allocator.allocate(head_share.size_bytes)
        self._blocks[self._requests.layout.slot_of[EMBEDDING_GRADIENT]] = total
        self._allocator.release(embedding_share)
        if total is not head_share:
            self._allocator.release(head_share)


def replay(
    model: ModelReplay, engine: EngineReplay, memory: Memory, grad_accumulation: int
) -> Replayed:
    """Build, then run steps; the peak is the last one's."""
    micro_batches = min(grad_accumulation, engine.repeats_from)

    def run_micro_batches() -> None:
        for index in range(micro_batches):
            model.micro_batch(is_first=index == 0, is_last=index == micro_batches - 1)

    return replay_steps(engine, memory, run_micro_batches)


def replay_steps(
    engine: EngineReplay, memory: Memory, run_micro_batches: Callable[[], None]
) -> Replayed:
    """Build, then run up to NUM_STEPS steps; one that ends as it began is repeated for ever."""
    allocator, found = memory.allocator, None
    engine.start()
    for _ in range(NUM_STEPS):
        allocator.reset_peak()
        run_micro_batches()
        engine.optimizer_step()
        before, found = found, memory.state()
        if found == before:
            break
    return Replayed(
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.num_retries
    )
