"""Gradients are averaged over the ranks while the backward goes on."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from runners.zero.collectives import Collectives
from runners.zero.groups import FlatGroup
from runners.zero.streams import SideStream


class Reducer:
    """Starts the reduction of each finished group on the side stream.

    Stage 0 averages the whole gradient and stage 1 the rank's part of it, both in place. From stage
    2 on a shard is made, and the whole gradient is freed when the next group is finished: so one
    is in use and one on its way at most.
    """

    def __init__(self, stage: int, collectives: Collectives, side: SideStream) -> None:
        self._stage, self._collectives, self._side = stage, collectives, side
        self._end: torch.cuda.Event | None = None
        self._read: list[Tensor] = []

    def start(self, group: FlatGroup) -> None:
        """Start to average a group's gradient; what the group before it held is freed."""
        if self._stage == 0:
            full = group.gradient
            assert full is not None
            self._end = self._side.run(
                partial(self._collectives.all_reduce, full, dist.ReduceOp.AVG)
            )
        elif self._stage == 1:
            self._end = self._side.run(partial(self._scatter, group, group.own_gradient()))
        else:
            self._shard(group)

    def settle(self) -> None:
        """Let what is computed from here on wait for the reductions, and free what they read."""
        self._side.wait(self._end)
        self._end = None
        self._read.clear()

    def _shard(self, group: FlatGroup) -> None:
        full = group.gradient
        assert full is not None
        self.settle()
        shard, total = full.new_empty(group.layout.shard_numel), group.gradient_shard
        self._end = self._side.run(partial(self._scatter, group, shard, total))
        self._read = [full] if total is None else [full, shard]
        if total is None:
            group.gradient_shard = shard
        group.free_full_gradient()

    @torch.no_grad()
    def _scatter(self, group: FlatGroup, shard: Tensor, total: Tensor | None = None) -> None:
        assert group.gradient is not None
        self._collectives.reduce_scatter(shard, group.gradient, dist.ReduceOp.AVG)
        if total is not None:
            total.add_(shard)
