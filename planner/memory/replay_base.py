"""What every engine allocates around a model's sections, whichever it is (see `replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.memory.optimizers import (
    Stepped,
    keeps_step_on_device,
    optimizer_calls,
    shared_states,
    step_temporaries,
    tensor_states,
)
from planner.memory.replay import Memory
from planner.model import ModelSpec
from planner.workload import TrainingWorkload

_TOKEN_BYTES, _SCALAR_BYTES = 8, 4
# A third micro-batch finds what the second found. Where the last one does what none before it did,
# one is needed between the first, which begins the gradients, and the last.
_MICRO_BATCHES = 2


def token_bytes(workload: TrainingWorkload) -> dict[str, int]:
    """Bytes of a micro-batch's token numbers and, where its rows are packed, of their positions."""
    size_bytes = workload.micro_batch * workload.sequence_length * _TOKEN_BYTES
    names = ("tokens", "positions") if workload.packed else ("tokens",)
    return dict.fromkeys(names, size_bytes)


class EngineBase:
    """What all engines share: the token batch, library workspaces, optimizer states."""

    repeats = False
    follows_gradients = False

    def __init__(
        self, spec: ModelSpec, workload: TrainingWorkload, memory: Memory, workspaces_bytes: int
    ) -> None:
        self._memory, self._workload = memory, workload
        self._num_layers, self._tied = spec.num_layers, spec.tie_word_embeddings
        self._workspace_bytes = workspaces_bytes // 2
        self._multiplies_for_angles = spec.multiplies_for_angles
        self.reduces_each, self._reduces = workload.sync_each_micro_batch, True

    @property
    def _is_last_alike(self) -> bool:
        """Whether a step's last micro-batch does what those before it do."""
        return self.reduces_each

    @property
    def repeats_from(self) -> int:
        """Micro-batches of a step that stand for any more; see `EngineReplay`."""
        return _MICRO_BATCHES if self._is_last_alike else _MICRO_BATCHES + 1

    def start_micro_batch(self, is_last: bool) -> None:
        """Reduce gradients in this micro-batch, or leave them whole to the last."""
        self._reduces = is_last or self.reduces_each

    def _take_tokens(self) -> None:
        for name, size_bytes in token_bytes(self._workload).items():
            self._memory.take_of_batch(name, size_bytes)

    def _take_workspace(self, section: str) -> None:
        # One per thread that multiplies: the main thread's here, autograd's at its first product.
        if section == "layer":
            self._memory.take(("workspace", "forward"), self._workspace_bytes)

    def after_embedding(self) -> None:
        """The forward's first product may be that of rotary angles (see `planner.as_run`)."""
        if self._multiplies_for_angles:
            self._take_workspace("layer")

    def last_gradient(self, group: int, layer: int) -> None:
        """Nothing, where an engine reduces at the end of a section."""

    def gradient(self, size_bytes: int) -> None:
        """Nothing, where an engine does not ask for it."""

    def keeps(self, gradient: Any) -> bool:
        """No gradient of a vocabulary-sized weight, where it is added or copied as it comes."""
        return False

    def before_backward_product(self) -> None:
        """Nothing, where an engine gathers at the ends of sections."""

    def first_backward_product(self) -> None:
        """Autograd's thread multiplies for the first time."""
        self._memory.take(("workspace", "backward"), self._workspace_bytes)

    def _clip(self, num_gradients: int, itemsize: int = _SCALAR_BYTES) -> None:
        """Take the scalars of clipping: each gradient's norm, all together, their own norm."""
        if not self._workload.max_grad_norm:
            return
        numbers = range(num_gradients)
        for number in numbers:
            self._memory.take(("norm", number), itemsize)
        self._memory.take(("norm", "all"), num_gradients * itemsize)
        self._memory.take(("norm", "total"), itemsize)
        self._memory.give(*(("norm", number) for number in reversed(numbers)))
        self._memory.give(("norm", "all"), ("norm", "total"))

    def _step_tensors(self, key: Any, tensors: Sequence[Stepped]) -> None:
        """Step the optimizers of `tensors`; states appear the first time."""
        for number, called in enumerate(optimizer_calls(self._workload.optimizer, tensors)):
            for index, tensor in enumerate(called):
                self._take_states((key, number, index), tensor)
            for state in shared_states(self._workload.optimizer):
                self._memory.take(("state", key, state.name), state.size_bytes)
            self._bind_temporaries(called)

    def _take_states(self, key: Any, tensor: Stepped) -> None:
        optimizer = self._workload.optimizer
        if keeps_step_on_device(optimizer, tensor):
            self._memory.take(("step", key), _SCALAR_BYTES)
        for state in tensor_states(optimizer, tensor):
            self._memory.take(("state", key, state.name), state.size_bytes)

    def _bind_temporaries(self, tensors: Sequence[Stepped]) -> None:
        bound: dict[Any, Any] = {}
        for number, (name, size_bytes) in enumerate(
            step_temporaries(self._workload.optimizer, tensors)
        ):
            self._memory.take(("temporary", number), size_bytes)
            self._memory.give(bound.get(name))
            bound[name] = ("temporary", number)
