"""Worlds: how the ranks of a plan become real in this process.

`nccl` and `cpu` are one process per rank on its own device, `shared` puts all processes on one
GPU over gloo, `solo` is one process that plays one rank of many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runners.contract import World
from runners.zero.collectives import Collectives, LocalCollectives, ProcessGroupCollectives

# gloo beside NCCL carries the small objects (results) and lets ranks wait for each other
# before any of them touches its GPU.
_BACKENDS = {
    World.NCCL: "cpu:gloo,cuda:nccl",
    World.SHARED: "cpu:gloo,cuda:gloo",
    World.CPU: "gloo",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those started for a run, as torchrun describes it."""

    rank: int = 0
    process_count: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Launch:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; one process without them."""
        read = os.environ.get
        return cls(
            rank=int(read("RANK", "0")),
            process_count=int(read("WORLD_SIZE", "1")),
            local_rank=int(read("LOCAL_RANK", "0")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorld:
    """A world set up: the rank this process plays, its device and its collectives."""

    kind: World
    launch: Launch
    device: torch.device
    collectives: Collectives

    @property
    def has_real_losses(self) -> bool:
        """Whether gradients, and so losses after the first step, are those of the whole world."""
        return self.kind is not World.SOLO or self.collectives.world_size == 1

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every process's `value` in rank order (a collective call)."""
        if self.launch.process_count == 1:
            return [value]
        values: list[dict[str, Any]] = [{}] * self.launch.process_count
        dist.all_gather_object(values, value)
        return values


def choose_device(world: World, launch: Launch, requested: str | None) -> torch.device:
    """Return the device of this process; never falls back to another kind of device.

    Raises ValueError where the world needs a GPU and there is none.
    """
    if world is World.CPU:
        return torch.device("cpu")
    default = f"cuda:{launch.local_rank}" if world is World.NCCL else "cuda:0"
    device = torch.device(requested or default)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"world {world} runs on a GPU and this machine has none that torch sees")
    return device


def check_world(world: World, world_size: int, rank: int, launch: Launch) -> None:
    """Raise ValueError where the processes started do not fit the plan's world size."""
    if world is World.SOLO:
        if launch.process_count != 1:
            raise ValueError(f"world solo is one process, not {launch.process_count}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: it must be 0 to {world_size - 1}")
    elif launch.process_count != world_size:
        raise ValueError(
            f"the plan's world size is {world_size}, but {launch.process_count} processes were "
            f"started for world {world}"
        )


@contextmanager
def open_world(
    world: World, *, world_size: int, rank: int, launch: Launch, device: torch.device
) -> Iterator[RunningWorld]:
    """Set up the process group of `world`, and tear it down afterwards.

    `rank` is the rank that `solo` plays; the other worlds take theirs from `launch`.
    """
    check_world(world, world_size, rank, launch)
    if world is World.SOLO:
        _open_fake_group(rank, world_size)
        collectives: Collectives = LocalCollectives(rank, world_size)
    else:
        _open_real_group(world, launch)
        collectives = ProcessGroupCollectives()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        yield RunningWorld(kind=world, launch=launch, device=device, collectives=collectives)
    finally:
        dist.destroy_process_group()


def _open_fake_group(rank: int, world_size: int) -> None:
    # FSDP2 wants a process group to shard over. Its collectives go through ours, because the
    # fake group of torch 2.11 leaves the output of a reduce-scatter uninitialised.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _open_real_group(world: World, launch: Launch) -> None:
    if launch.process_count > 1:
        dist.init_process_group(_BACKENDS[world])
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(_BACKENDS[world], store=store, rank=0, world_size=1)
