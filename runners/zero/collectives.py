"""The three collectives of data-parallel training, counted, over real or pretended ranks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What gloo and NCCL say when a peer is gone or a deadline has passed.
_OTHERS_FAULT = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed? ?out|remote process exited"
)


class RankLostError(RuntimeError):
    """Another rank of the group stopped, or did not answer within the group's timeout."""


@dataclass(slots=True)
class Traffic:
    """Calls of one collective, and the payload: bytes of the full (unsharded) buffers."""

    calls: int = 0
    bytes: int = 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Collectives(ABC):
    """Collectives of `world_size` ranks as seen by `rank`; reductions sum, or average with AVG.

    The payload counted is the full buffer's bytes: the tensor of an all-reduce, the input of a
    reduce-scatter, the output of an all-gather. A ring moves (N-1)/N of it per rank, an
    all-reduce twice that.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._traffic: dict[str, Traffic] = {}
        self._counting = True

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` over the ranks, in place."""
        self.count("all_reduce", _bytes(tensor))
        self._all_reduce(tensor, op)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce `full` [N * n] over the ranks and leave this rank's part in `output` [n].

        `output` may be this rank's own part of `full`.
        """
        self.count("reduce_scatter", _bytes(full))
        self._reduce_scatter(output, full, op)

    def all_gather(self, output: Tensor, shard: Tensor) -> None:
        """Fill `output` [N * n] with every rank's `shard` [n], which may be its own part of it."""
        self.count("all_gather", _bytes(output))
        self._all_gather(output, shard)

    def count(self, name: str, size_bytes: int, calls: int = 1) -> None:
        """Count collectives that a library ran by itself: their full buffers' bytes together."""
        if self._counting:
            traffic = self._traffic.setdefault(name, Traffic())
            traffic.calls += calls
            traffic.bytes += size_bytes

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return calls and bytes per collective since the last reset."""
        return {name: asdict(traffic) for name, traffic in self._traffic.items()}

    def reset_traffic(self) -> None:
        """Start counting from zero."""
        self._traffic.clear()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run collectives that belong to no training step."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's small `value` in rank order; not counted."""
        return [value]

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None: ...

    @abstractmethod
    def _reduce_scatter(
        self, output: Tensor, full: Tensor, op: dist.ReduceOp.RedOpType
    ) -> None: ...

    @abstractmethod
    def _all_gather(self, output: Tensor, shard: Tensor) -> None: ...


class ProcessGroupCollectives(Collectives):
    """Collectives over a real torch.distributed process group.

    NCCL averages in the reduction itself. gloo does not average every tensor: it sums, and the
    result is divided.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group the collectives run over; None is the default group."""
        return self._group

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's small `value` in rank order; not counted."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        divides = self._divides(tensor, op)
        with self._explained("all_reduce"):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM if divides else op, group=self._group)
        if divides:
            tensor.div_(self.world_size)

    def _reduce_scatter(self, output: Tensor, full: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        divides = self._divides(full, op)
        kind = dist.ReduceOp.SUM if divides else op
        with self._explained("reduce_scatter"):
            dist.reduce_scatter_tensor(output, full, op=kind, group=self._group)
        if divides:
            output.div_(self.world_size)

    def _divides(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> bool:
        if op != dist.ReduceOp.AVG:
            return False
        group = self._group or dist.group.WORLD
        assert group is not None
        return group._get_backend(tensor.device).name() != "nccl"

    def _all_gather(self, output: Tensor, shard: Tensor) -> None:
        with self._explained("all_gather"):
            dist.all_gather_into_tensor(output, shard, group=self._group)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Say of a collective that another rank left what that means."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _OTHERS_FAULT.search(str(error)):
                raise
            words = str(error).strip().splitlines()[0]
            raise RankLostError(
                f"{name} on rank {self.rank} of {self.world_size} failed because another rank stopped "
                f"or does not answer ({words}): look at the log of the rank that ended first"
            ) from error


class LocalCollectives(Collectives):
    """One rank alone, which takes every other rank for a copy of itself at rest.

    Outputs are always filled: a gather repeats the rank's own shard, a sum is the rank's own
    contribution, an average its share of the ranks' number. No buffer is allocated, and a gather takes at most three kernels at any
    world size.
    """

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self._divides(op):
            tensor.div_(self.world_size)

    def _reduce_scatter(self, output: Tensor, full: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        own, output = full.view(self.world_size, -1)[self.rank], output.view(-1)
        if self._divides(op):
            torch.div(own, self.world_size, out=output)
        elif own.data_ptr() != output.data_ptr():
            output.copy_(own)

    def _divides(self, op: dist.ReduceOp.RedOpType) -> bool:
        return self.world_size > 1 and op == dist.ReduceOp.AVG

    def _all_gather(self, output: Tensor, shard: Tensor) -> None:
        parts, own = output.view(self.world_size, -1), shard.view(-1)
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)
        for others in (parts[: self.rank], parts[self.rank + 1 :]):
            others.copy_(own.expand_as(others))
