"""One stage of a pipeline, replayed: one forward and one backward in turn (1F1B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.memory.groups import Place
from planner.memory.replay import (
    NUM_STEPS,
    Action,
    Blocks,
    EngineReplay,
    Memory,
    ModelReplay,
    Replayed,
)
from planner.memory.sections import COMPONENTS, StepSequence
from planner.rank import RankSpec

_GRADIENTS = COMPONENTS.index("gradients")


class StageReplay(ModelReplay):
    """Runs the sections of one stage; micro-batches in flight keep their blocks apart.

    In place of the sections that other stages run it has what it receives from them: activations as
    large as the embedding's, and the gradient of its output.
    """

    def __init__(
        self, spec: RankSpec, sequence: StepSequence, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(spec, sequence, *arguments, **options)
        for actions in (self._first_actions, self._later_actions):
            for place in actions:
                if not spec.runs(place.section) and place.section != "embed":
                    actions[place] = _received(place, actions[place])
        self._in_flight: dict[int, dict[Place, Blocks]] = {}

    def forward(self, index: int) -> None:
        """Run the forward of a step's micro-batch `index`."""
        self._actions = self._first_actions
        self._blocks = self._in_flight[index] = {}
        for place in self._forward:
            self._run(place)

    def backward(self, index: int, is_last: bool) -> None:
        """Run its backward; the step's last micro-batch may reduce for all."""
        self._actions = self._later_actions if index else self._first_actions
        self._engine.start_micro_batch(is_last)
        self._blocks = self._in_flight.pop(index)
        for place in self._backward:
            self._run(place)


def _received(place: Place, actions: Sequence[Action]) -> list[Action]:
    """What happens where another stage runs: only what outlives it, but for gradients."""
    releases = [released for action in actions if len(action) == 2 for released in action[0]]
    own = {number for where, number in releases if where == place}
    received: list[Action] = []
    number = 0
    for action in actions:
        if len(action) == 3:
            outlives = (
                place.section == "loss_backward" and number not in own and action[0] != _GRADIENTS
            )
            received.append(action if outlives else (action[0], action[1], 0))
            number += 1
        else:
            received.append(action)
    return received


def replay_stage(
    model: StageReplay, engine: EngineReplay, memory: Memory, grad_accumulation: int, flying: int
) -> Replayed:
    """Build, then run steps in which up to `flying` micro-batches wait for their backward."""
    engine.start()
    # One more than in flight repeats from there on; see MAX_UNREDUCED_MICRO_BATCHES.
    count = min(grad_accumulation, flying + (1 if engine.reduces_each else 2))
    for _ in range(NUM_STEPS):
        memory.allocator.reset_peak()
        for turn in range(count + flying - 1):
            if turn < count:
                model.forward(turn)
            if turn >= flying - 1:
                index = turn - flying + 1
                model.backward(index, is_last=index == count - 1)
        engine.optimizer_step()
    allocator = memory.allocator
    return Replayed(
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.num_retries
    )
