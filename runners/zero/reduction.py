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

    Where gradients are `sent` in another dtype than they are made in, they are cast before and kept
    in the dtype `kept`; stage 1 then makes shards too.
    """

    def __init__(
        self,
        stage: int,
        collectives: Collectives,
        side: SideStream,
        sent: torch.dtype,
        kept: torch.dtype,
    ) -> None:
        self._stage, self._collectives, self._side = stage, collectives, side
        self._sent, self._kept = sent, kept
        self._end: torch.cuda.Event | None = None
        self._read: list[Tensor] = []

    def start(self, group: FlatGroup) -> None:
        """Start to average a group's gradient; what the group before it held is freed."""
        full = group.gradient
        assert full is not None
        casts = full.dtype != self._sent
        if self._stage == 0:
            self._whole(group, full)
        elif self._stage == 1 and not casts:
            self._end = self._side.run(partial(self._scatter, full, group.own_gradient()))
        else:
            self.settle()
            # The cast is computed, so the gradient it reads is free as soon as it is in order.
            sent = full.to(self._sent)
            if casts:
                group.free_full_gradient()
                full = sent
            self._shard(group, full)

    def settle(self) -> None:
        """Let what is computed from here on wait for the reductions, and free what they read."""
        self._side.wait(self._end)
        self._end = None
        self._read.clear()

    def _whole(self, group: FlatGroup, full: Tensor) -> None:
        average = partial(self._collectives.all_reduce, op=dist.ReduceOp.AVG)
        if full.dtype == self._sent:
            self._end = self._side.run(partial(average, full))
            return
        self.settle()
        sent = full.to(self._sent)
        if self._kept == self._sent:
            group.free_full_gradient()
            group.gradient = sent
            self._end = self._side.run(partial(average, sent))
        else:
            self._end = self._side.run(partial(self._average_into, full, sent))
            self._read = [sent]

    @torch.no_grad()
    def _average_into(self, full: Tensor, sent: Tensor) -> None:
        self._collectives.all_reduce(sent, dist.ReduceOp.AVG)
        full.copy_(sent)

    def _shard(self, group: FlatGroup, full: Tensor) -> None:
        shard, total = full.new_empty(group.layout.shard_numel), group.gradient_shard
        is_first = total is None
        if total is None:
            is_kept = shard.dtype == self._kept
            total = group.gradient_shard = (
                shard if is_kept else torch.empty_like(shard, dtype=self._kept)
            )
        self._end = self._side.run(partial(self._scatter, full, shard, total, is_first))
        self._read = [full] if total is shard else [full, shard]
        group.free_full_gradient()

    @torch.no_grad()
    def _scatter(
        self, full: Tensor, shard: Tensor, total: Tensor | None = None, is_first: bool = True
    ) -> None:
        self._collectives.reduce_scatter(shard, full, dist.ReduceOp.AVG)
        if total is None or total is shard:
            return
        if is_first:
            total.copy_(shard)
        else:
            total.add_(shard)
