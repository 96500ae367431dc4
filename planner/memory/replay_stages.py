"""One stage of a pipeline, replayed: one forward and one backward in turn (1F1B)."""

from __future__ import annotations

import numpy as np

from planner.memory.replay import (
    EngineReplay,
    Memory,
    ModelReplay,
    Replayed,
    record_steps,
    replayed,
)
from planner.memory.requests import Integers, Layout, Section
from planner.memory.sections import COMPONENTS
from planner.model import ModelSpec
from planner.rank import RankSpec

_GRADIENTS = COMPONENTS.index("gradients")


class StageReplay(ModelReplay):
    """Runs the sections of one stage; micro-batches in flight keep their blocks apart.

    In place of the sections that other stages run it has what it receives from them: activations as
    large as the embedding's, and the gradient of its output.
    """

    def _kinds(self, spec: ModelSpec, layout: Layout) -> Integers:
        """The kind of each request; none where another stage runs, but for what it hands on."""
        kinds = super()._kinds(spec, layout).copy()
        assert isinstance(spec, RankSpec)
        for section in (*layout.forward, *layout.backward):
            name = section.place.section
            if not spec.runs(name) and name != "embed":
                _keep_received(layout, section, kinds)
        return kinds

    def forward(self, index: int) -> None:
        """Run the forward of a step's micro-batch `index`."""
        self._begin(index, self._first)
        self._run(self._requests.layout.forward)

    def backward(self, index: int, is_last: bool) -> None:
        """Run its backward; the step's last micro-batch may reduce for all."""
        self._engine.start_micro_batch(is_last)
        self._requests, self._first_slot = (
            self._later if index else self._first,
            self._slots_of[index],
        )
        self._run(self._requests.layout.backward)


def _keep_received(layout: Layout, section: Section, kinds: Integers) -> None:
    """Drop what another stage allocates in a section, but for what it hands on.

    That is what outlives the loss's backward and is no gradient of a weight.
    """
    here = section.span
    slots, found = layout.slots[here], kinds[here]
    received = np.zeros(len(slots), dtype=bool)
    if section.place.section == "loss_backward":
        released = slots[found < 0]
        received = ~np.isin(slots, released) & (layout.components[here] != _GRADIENTS)
    found[(found >= 0) & ~received] = layout.no_tensor


def replay_stage(
    model: StageReplay, engine: EngineReplay, memory: Memory, grad_accumulation: int, flying: int
) -> Replayed:
    """Build, then run steps in which up to `flying` micro-batches wait for their backward."""
    # Those in flight are alike.
    count = min(grad_accumulation, flying - 1 + engine.repeats_from)

    def run_micro_batches() -> None:
        for turn in range(count + flying - 1):
            if turn < count:
                model.forward(turn)
            if turn >= flying - 1:
                index = turn - flying + 1
                model.backward(index, is_last=index == count - 1)

    return replayed(memory, record_steps(engine, memory, run_micro_batches))
