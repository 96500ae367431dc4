"""Parameters are whole while they are used, and those used next are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runners.zero.collectives import Collectives
from runners.zero.errors import mark_released, mark_whole
from runners.zero.groups import FlatGroup, decoder_layers
from runners.zero.streams import SideStream

# Says that the backward of a unit begins.
BackwardBegins = Callable[[int], None]


class Gatherer:
    """Stages 1 and 2: gathers groups one unit ahead of their first use after a step.

    Each stays whole for the micro-batches of the step, and is freed in the backward of the last one
    as soon as its gradients are there: so each is gathered once a step.

    Units are, in order of use, the embedding (0), every decoder layer (its index + 1) and the head
    with, where it is tied, the embedding's weight. The order is the model's own: nothing has to be
    learned from a first step.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FlatGroup],
        collectives: Collectives,
        side: SideStream,
    ) -> None:
        self._all_gather, self._side = collectives.all_gather, side
        self._is_backward = self._is_last = False
        self._arrivals: dict[FlatGroup, torch.cuda.Event | None] = {}
        self._whole: list[FlatGroup] = []
        layers = decoder_layers(model)
        names = ["embedding", *(f"layer.{index}" for index in range(len(layers))), "head"]
        self._units = [[group for group in groups if group.name == name] for name in names]
        self.unit_of = {group: unit for unit, held in enumerate(self._units) for group in held}
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        is_tied = [head in _modules_of([group]) for group in self._units[0]]
        self._units[-1] += [g for g, tied in zip(self._units[0], is_tied, strict=True) if tied]
        for group in groups:
            mark_released(group)
        self._hook(layers, head)

    def _hook(self, layers: nn.ModuleList, head: nn.Module) -> None:
        last = len(self._units) - 1
        at_end = {head, *_modules_of(g for g in self._units[-1] if g.name == "head")}
        for module in _modules_of(self._units[0]) - at_end:
            module.register_forward_pre_hook(partial(self._enter, 0))
        for unit, layer in enumerate(layers, start=1):
            layer.register_forward_pre_hook(partial(self._enter, unit))
            layer.register_forward_hook(partial(self._leave_layer, unit))
        for module in at_end:
            module.register_forward_pre_hook(partial(self._enter, last))
        head.register_forward_hook(self._leave_head)

    def finish(self, group: FlatGroup) -> None:
        """Say that a group's gradients of this micro-batch are all there."""
        if self._is_last:
            self.release(group)

    def release(self, group: FlatGroup) -> None:
        """Free a group's whole parameters, if they are there or on their way."""
        if group in self._arrivals:
            self._side.wait(self._arrivals.pop(group))
        if group in self._whole:
            self._whole.remove(group)
            mark_released(group)
        group.release()

    def release_all(self) -> None:
        """Free all that is whole: it is old once the shards are stepped."""
        self._keep_only(())

    def settle(self) -> None:
        """Let what is computed from here on wait for all that is on its way."""
        for group in list(self._arrivals):
            self._side.wait(self._arrivals.pop(group))
            mark_whole(group)

    def need_all(self) -> None:
        """Have every group whole."""
        for unit in range(len(self._units)):
            self._need(unit)

    @contextmanager
    def backward(self, last_micro_batch: bool) -> Iterator[None]:
        """Tell what a checkpoint computes again from a forward, and free behind the last backward.

        A backward reads no embedding, unless the head is tied to it.
        """
        self._is_backward, self._is_last = True, last_micro_batch
        for group in self._units[0] if last_micro_batch else ():
            if group not in self._units[-1]:
                self.release(group)
        try:
            yield
        finally:
            self._is_backward = self._is_last = False

    def _enter(self, unit: int, module: nn.Module, args: Any) -> None:
        """Have a unit's parameters before its forward, or before a checkpoint computes it again."""
        self._need(unit)
        if not self._is_backward and unit + 1 < len(self._units):
            self._start(unit + 1)

    def _leave_layer(self, unit: int, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_backward:  # else a checkpoint's recompute, which a backward follows at once
            _before_gradients(output, partial(self._before_backward, unit))

    def _leave_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_backward:
            _before_gradients(output, self._before_head_backward)

    def _before_head_backward(self, gradient: Tensor) -> None:
        self._need(len(self._units) - 1)

    def _before_backward(self, unit: int, gradient: Tensor) -> None:
        # Whole already, unless a second backward of the same step was said to be its last.
        self._need(unit)

    def _start(self, unit: int) -> None:
        """Start to gather what of a unit is neither there nor on its way."""
        for group in self._units[unit]:
            if not group.is_gathered:
                group.make_room()
                self._arrivals[group] = self._side.run(partial(group.fill, self._all_gather))
                self._whole.append(group)

    def _need(self, unit: int) -> None:
        self._start(unit)
        for group in self._units[unit]:
            if group in self._arrivals:
                self._side.wait(self._arrivals.pop(group))
                mark_whole(group)

    def _keep_only(self, units: Iterable[int]) -> None:
        kept = [group for unit in units for group in self._units[unit]]
        for group in [group for group in self._whole if group not in kept]:
            self.release(group)


class LayerGatherer(Gatherer):
    """Stage 3: frees groups behind their use, and gathers layers again for their backward.

    Never twice where a checkpoint recomputes. At any time two units are whole at most: the one in
    use and the next.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FlatGroup],
        collectives: Collectives,
        side: SideStream,
        on_backward: BackwardBegins,
    ) -> None:
        self._on_backward = on_backward
        self._reached: list[int] = []
        super().__init__(model, groups, collectives, side)

    def finish(self, group: FlatGroup) -> None:
        """Free a group: nothing uses it any more in this micro-batch."""
        self.release(group)

    @contextmanager
    def backward(self, last_micro_batch: bool) -> Iterator[None]:
        """Tell what a checkpoint computes again from a forward; free all that a backward leaves."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False
        self.release_all()
        self._reached.clear()

    def _enter(self, unit: int, module: nn.Module, args: Any) -> None:
        self._need(unit)
        if self._is_backward or unit == len(self._units) - 1:
            return
        if unit == 0:
            self._reached.clear()
        self._keep_only((unit, unit + 1))
        self._start(unit + 1)

    def _leave_layer(self, unit: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_backward:
            return  # a checkpoint's recompute: its backward is about to use the parameters
        hooked = _before_gradients(output, partial(self._before_backward, unit))
        if hooked and unit not in self._reached:
            self._reached.append(unit)
        for group in self._units[unit]:
            self.release(group)

    def _before_head_backward(self, gradient: Tensor) -> None:
        # Only here: the loss is often the highest moment of a step, and is over now.
        if self._reached:
            self._start(self._reached[-1])

    def _before_backward(self, unit: int, gradient: Tensor) -> None:
        self._on_backward(unit)
        while self._reached and self._reached[-1] >= unit:
            self._reached.pop()
        following = self._reached[-1:]
        self._keep_only((unit, *following))
        self._need(unit)
        for below in following:
            self._start(below)


def _before_gradients(output: Any, act: Callable[[Tensor], None]) -> bool:
    """Have `act` called with the gradient of each tensor of a module's output, if any has one."""
    outputs = output if isinstance(output, tuple) else (output,)
    trained = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    for tensor in trained:
        tensor.register_hook(act)
    return bool(trained)


def _modules_of(groups: Iterable[FlatGroup]) -> set[nn.Module]:
    """All modules at which parameters of these groups hang."""
    return {owner.module for group in groups for owners in group.owners for owner in owners}
