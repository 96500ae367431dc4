"""Replay whole training steps through the caching allocator: allocated and reserved, to the block.

The traced rows of each section run layer by layer between the engine's own allocations. Three steps
are run: optimizer states appear in the first, and from the third on nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from planner.memory.allocator import CachingAllocator
from planner.memory.expandable import ExpandableAllocator
from planner.memory.groups import Place
from planner.memory.sections import COMPONENTS, FLAT_GROUPS, Row, StepSequence, allocations
from planner.memory.templates import monomial_values
from planner.model import ModelSpec

NUM_STEPS = 3
# A third micro-batch finds what the second found. Where only the last one reduces, one is needed
# between the first, which begins the gradients, and the last.
MAX_MICRO_BATCHES, MAX_UNREDUCED_MICRO_BATCHES = 2, 3
_GRADIENTS = COMPONENTS.index("gradients")
Blocks = list[Any]
# (component, monomial, bytes) allocates, (what, None) releases, (group,) marks a first gradient.
Action = tuple[Any, ...]


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


class EngineReplay(Protocol):
    """An engine's own allocations around the sections of a step."""

    reduces_each: bool
    """Whether gradients are reduced after every micro-batch."""

    def start(self) -> None:
        """Build: parameters and what stays."""

    def start_micro_batch(self, is_last: bool) -> None:
        """Say whether the micro-batch that begins is the step's last."""

    def before(self, section: str, layer: int) -> None:
        """Gather what the section needs."""

    def first_gradient(self, group: int, layer: int) -> None:
        """A parameter group's first gradient has arrived (an index of FLAT_GROUPS)."""

    def last_gradient(self, group: int, layer: int) -> None:
        """A parameter group's last gradient has been added."""

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
        monomials = sequence.steps.monomials
        values = monomial_values(spec, monomials, micro_batch, sequence_length, lora_rank)
        sizes = [round(value * 2) for value in values.tolist()]  # halves: head_dim may be odd
        self._forward, self._backward = tuple(sequence.forward()), tuple(sequence.backward())
        self._first_actions = _actions(sequence, sizes)
        self._later_actions = _actions(later_steps, sizes) if later_steps else self._first_actions
        self._actions = self._first_actions
        # Autograd holds the head's share of a tied weight until the embedding's has been added.
        self._tied_row = (
            _weight_gradient(sequence, Place("loss_backward")) if spec.tie_word_embeddings else -1
        )
        self._joining_row = _weight_gradient(sequence, Place("embed_backward"))
        self._product_row = _first_product(sequence)
        self._tied_block: Any = None
        self._blocks: dict[Place, Blocks] = {}

    def micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Run forward and backward once, as the step's first or last micro-batch."""
        self._actions = self._first_actions if is_first else self._later_actions
        self._engine.start_micro_batch(is_last)
        for place in (*self._forward, *self._backward):
            self._run(place)

    def _run(self, place: Place) -> None:
        self._engine.before(place.section, place.layer)
        own: Blocks = []
        self._blocks[place] = own
        gradients: Blocks = []
        for action in self._actions[place]:
            if len(action) == 3:
                self._allocate(place, action, own, gradients)
            elif len(action) == 2:
                for where, number in action[0]:
                    self._release(self._blocks[where], number)
            else:
                self._mark(place, action[0])
            if self._tied_block is not None and place.section == "embed_backward":
                self._join_tied(own, gradients)
        self._engine.after(place.section, place.layer, gradients)

    def _allocate(self, place: Place, action: Action, own: Blocks, gradients: Blocks) -> None:
        is_tied = place.section == "loss_backward" and len(own) == self._tied_row
        # A head tied to a frozen embedding is frozen too: it has no gradient.
        is_frozen = is_tied and self._joining_row < 0
        block = self._allocator.allocate(action[2]) if action[2] and not is_frozen else None
        if is_tied:
            self._tied_block, block = block, None
        elif action[0] == _GRADIENTS:
            gradients.append(block)
        own.append(block)
        if place.section == "loss_backward" and len(own) == self._product_row + 1:
            self._engine.first_backward_product()

    def _release(self, blocks: Blocks, number: int) -> None:
        block, blocks[number] = blocks[number], None
        if block is not None:
            self._allocator.release(block)

    def _mark(self, place: Place, mark: int) -> None:
        group = mark % len(FLAT_GROUPS)
        if mark != group:
            self._engine.last_gradient(group, place.layer)
        elif place.section != "loss_backward" or self._tied_row < 0:
            self._engine.first_gradient(group, place.layer)

    def _join_tied(self, own: Blocks, gradients: Blocks) -> None:
        """Once the embedding's share exists both are summed, and what is left over is freed.

        Into the head's share where that is the result of autocast's cast; where it is the view that
        a product's backward gives, autograd makes a third tensor (read from allocator snapshots on
        an H200, torch 2.11; torch/csrc/autograd/input_buffer.cpp, accumulate).
        """
        if len(own) <= self._joining_row:
            return
        embedding_share, head_share = own[self._joining_row], self._tied_block
        if self._sums_in_place:
            total = head_share
        else:
            total = self._allocator.allocate(head_share.size_bytes)
        own[self._joining_row], self._tied_block = total, None
        if embedding_share in gradients:
            gradients[gradients.index(embedding_share)] = total
        self._allocator.release(embedding_share)
        if total is not head_share:
            self._allocator.release(head_share)


def _actions(sequence: StepSequence, doubled_sizes: list[int]) -> dict[Place, list[Action]]:
    """The rows of every place with sizes in bytes and with the tensors that each releases."""
    return {
        place: [_action(sequence, place, row, doubled_sizes) for row in sequence.rows(place)]
        for place in (*sequence.forward(), *sequence.backward())
    }


def _action(sequence: StepSequence, place: Place, row: Row, doubled_sizes: list[int]) -> Action:
    if len(row) == 3:
        return (row[0], row[1], doubled_sizes[row[1]] * row[2] // 2)
    return (sequence.released(place, row), None) if len(row) == 2 else (row[0],)


def _weight_gradient(sequence: StepSequence, place: Place) -> int:
    """Which allocation of a section is the gradient of a vocabulary-sized weight: the last such.

    A loss in chunks adds to one buffer from the start: there it is the first.
    """
    found = -1
    for number, row in enumerate(allocations(sequence.rows(place))):
        names = sequence.steps.monomials[row[1]].split("*")
        if "chunk" in names and found >= 0:
            break
        if "vocab" in names and "seq" not in names and "chunk" not in names:
            found = number
    return found


def _first_product(sequence: StepSequence) -> int:
    """Which allocation of the loss's backward is the first product's: the first not of logits."""
    for number, row in enumerate(allocations(sequence.rows(Place("loss_backward")))):
        names = sequence.steps.monomials[row[1]].split("*")
        if len(names) > 1 and not {"vocab", "seq"} <= set(names):
            return number
    return -1


def replay(
    model: ModelReplay, engine: EngineReplay, memory: Memory, grad_accumulation: int
) -> Replayed:
    """Build, then run NUM_STEPS steps; the peak is the last step's."""
    engine.start()
    most = MAX_MICRO_BATCHES if engine.reduces_each else MAX_UNREDUCED_MICRO_BATCHES
    micro_batches = min(grad_accumulation, most)
    for _ in range(NUM_STEPS):
        memory.allocator.reset_peak()
        for index in range(micro_batches):
            model.micro_batch(is_first=index == 0, is_last=index == micro_batches - 1)
        engine.optimizer_step()
    allocator = memory.allocator
    return Replayed(
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.num_retries
    )
