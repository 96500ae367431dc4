"""Memory where our engine's optimizer is in host memory (runners/zero/offload.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.memory.adapters import trained_groups
from planner.memory.groups import GroupSizes, group_numels
from planner.memory.replay_peakmark import PeakmarkReplay
from planner.memory.states import HeldGroup, Parts, PeakmarkStates, compute_bytes
from planner.model import ModelSpec
from planner.rank import with_all_experts
from planner.workload import Parallelism, TrainingWorkload

_FP32_BYTES = 4
_BUFFERS = 2


class OffloadedStates(PeakmarkStates):
    """What stays on the device: parameters and gradients, no master copies and no moments."""

    offloads = True

    def __init__(self, spec: ModelSpec, *plan: Any, **options: Any) -> None:
        super().__init__(spec, *plan, **options)
        self._states = self._tensors.map(lambda tensors: ())

    def held_numels(self) -> list[HeldGroup]:
        """Per kind of group, the parameters kept; nothing is stepped here."""
        return [group._replace(stepped=0) for group in super().held_numels()]

    def optimizer_step(self) -> Parts:
        """Gradients while they go to the host; copies take nothing more."""
        return {**super().optimizer_step(), "temporary": 0}


class OffloadedReplay(PeakmarkReplay):
    """The engine's allocations without the optimizer's."""

    def optimizer_step(self) -> None:
        """Copy gradients to the host and shards back; then the gradients go."""
        self._clip(sum(bool(self._stepped(group)) for group in self._groups))
        for group in self._groups:
            self._memory.give(("gradient", group), ("gradient shard", group))


class HostRow(NamedTuple):
    """Some of what one rank keeps in host memory."""

    name: str
    size_bytes: int
    is_pinned: bool
    formula: str


def host_shards(spec: ModelSpec, workload: TrainingWorkload, world_size: Any) -> GroupSizes:
    """Elements of each group that one rank steps, padded to the world size."""
    trained = trained_groups(spec, workload)
    numels = trained.trained if trained else group_numels(with_all_experts(spec))
    return numels.map(lambda numel: -(-numel // world_size))


def pinned_bytes(size_bytes: int) -> int:
    """Return what torch pins for a tensor: the next power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h, `PowerOf2Ceil`.
    """
    return 1 << max(size_bytes - 1, 0).bit_length()


def host_ledger(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism
) -> tuple[HostRow, ...]:
    """Everything that one rank keeps in host memory for the optimizer; rows sum to the total."""
    shards = host_shards(spec, workload, parallelism.world_size)
    total, longest = int(shards.total()), int(shards.largest())
    itemsize = compute_bytes(workload.precision)
    kept = (
        HostRow(name, total * _FP32_BYTES, False, f"{total:,} elements x {_FP32_BYTES} B")
        for name in ("fp32 parameters", "exp_avg", "exp_avg_sq")
    )
    cast = HostRow(
        "gradient in fp32", longest * _FP32_BYTES, False, f"{longest:,} elements x {_FP32_BYTES} B"
    )
    one_bytes = pinned_bytes(longest * itemsize)
    words = (
        f"{_BUFFERS} x {longest:,} elements x {itemsize} B, each rounded up to {one_bytes:,} B "
        "by torch's pinned allocator"
    )
    buffers = (
        HostRow(name, _BUFFERS * one_bytes, True, words)
        for name in ("gradient buffers", "parameter buffers")
    )
    return (*kept, cast, *buffers)
