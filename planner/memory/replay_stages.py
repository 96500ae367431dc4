"""One stage of a pipeline, replayed: one forward and one backward in turn (1F1B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.memory.replay import NUM_STEPS, Blocks, EngineReplay, Memory, ModelReplay, Replayed
from planner.memory.sections import COMPONENTS, THIS, Steps
from planner.rank import RankSpec

_GRADIENTS = COMPONENTS.index("gradients")


class StageReplay(ModelReplay):
    """Runs the sections of one stage; micro-batches in flight keep their blocks apart.

    In place of the sections that other stages run it has what it receives from them: activations as
    large as the embedding's, and the gradient of its output.
    """

    def __init__(self, spec: RankSpec, steps: Steps, *arguments: Any, **options: Any) -> None:
        super().__init__(spec, steps, *arguments, **options)
        for rows in (self._first_rows, self._later_rows):
            for section in rows:
                if not spec.runs(section) and section != "embed":
                    rows[section] = _received(section, rows[section])
        self._in_flight: dict[int, dict[tuple[str, int], Blocks]] = {}

    def forward(self, index: int) -> None:
        """Run the forward of a step's micro-batch `index`."""
        self._rows = self._first_rows
        self._blocks = self._in_flight[index] = {}
        self._run("embed", 0)
        for layer in range(self._num_layers):
            self._run(self._layer_name(layer), layer)
        for section in ("head", "loss"):
            self._run(section, 0)

    def backward(self, index: int, is_last: bool) -> None:
        """Run its backward; the step's last micro-batch may reduce for all."""
        self._rows = self._later_rows if index else self._first_rows
        self._engine.start_micro_batch(is_last)
        self._blocks = self._in_flight.pop(index)
        self._previous = self._blocks["loss", 0]
        self._run("loss_backward", 0)
        for layer in range(self._num_layers - 1, -1, -1):
            self._run(self._layer_name(layer) + "_backward", layer)
        self._run("embed_backward", 0)


def _received(section: str, rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rows of a section that another stage runs: only what outlives it, but for gradients."""
    own = {row[1] for row in rows if len(row) == 2 and row[0] == THIS}
    received: list[tuple[int, ...]] = []
    number = 0
    for row in rows:
        if len(row) == 3:
            outlives = section == "loss_backward" and number not in own and row[0] != _GRADIENTS
            received.append(row if outlives else (row[0], row[1], 0))
            number += 1
        else:
            received.append(row)
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
