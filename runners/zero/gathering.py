"""Stage 3: parameters are whole while they are used, and those used next are on their way."""

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
    """Gathers groups one unit ahead of their use and frees them behind it.

    Units are, in order of use, the embedding (0), every decoder layer (its index + 1) and the head
    with, where it is tied, the embedding's weight. The order is the model's own: nothing has to be
    learned from a first step. The backward gathers layers again, never twice where a checkpoint
    recomputes; it reads no embedding. At any time two units are whole at most: the one in use and
    the next.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FlatGroup],
        collectives: Collectives,
        side: SideStream,
        on_backward: BackwardBegins,
    ) -> None:
        self._all_gather, self._side, self._on_backward = collectives.all_gather, side, on_backward
        self._is_backward = False
        self._arrivals: dict[FlatGroup, torch.cuda.Event | None] = {}
        self._whole: list[FlatGroup] = []
        self._reached: list[int] = []
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

    def release(self, group: FlatGroup) -> None:
        """Free a group's whole parameters, if they are there or on their way."""
        if group in self._arrivals:
            self._side.wait(self._arrivals.pop(group))
        if group in self._whole:
            self._whole.remove(group)
            mark_released(group)
        group.release()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Tell what a checkpoint computes again from a forward; free all that a backward leaves."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False
        self._keep_only(())
        self._reached.clear()

    def _enter(self, unit: int, module: nn.Module, args: Any) -> None:
        """Have a unit's parameters before its forward, or before a checkpoint computes it again."""
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
        outputs = output if isinstance(output, tuple) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))
                if unit not in self._reached:
                    self._reached.append(unit)
        for group in self._units[unit]:
            self.release(group)

    def _leave_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and not self._is_backward:
            output.register_hook(self._before_head_backward)

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


def _modules_of(groups: Iterable[FlatGroup]) -> set[nn.Module]:
    """All modules at which parameters of these groups hang."""
    return {owner.module for group in groups for owners in group.owners for owner in owners}
