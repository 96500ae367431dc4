"""The optimizer in host memory: gradient shards come over, updated shards go back (ZeRO-Offload).

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv:2101.06840.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from runners.zero.groups import storage_bytes
from runners.zero.optimizer import ShardOptimizer

OFFLOADED_KIND = "adamw_fused"
_BUFFERS = 2


class HostOptimizer(ShardOptimizer):
    """Steps an fp32 copy [n] of one shard on the CPU; nothing of it is on the shard's device."""

    def __init__(self, shard: Tensor, *, lr: float) -> None:
        host = shard.detach().to("cpu", torch.float32, copy=True)
        super().__init__(host, kind=OFFLOADED_KIND, lr=lr, with_master=False)
        self.shard = shard

    def restore(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Continue from `values` and `states`, and bring the device's shard up to date."""
        super().restore(states)
        self.shard.copy_(self.values)

    def state_bytes(self) -> int:
        """Bytes on the shard's device: none."""
        return 0

    def host_bytes(self) -> int:
        """Bytes of the fp32 copy and of the moments, in host memory."""
        return storage_bytes([self.values]) + super().state_bytes()


class HostStepper:
    """Steps host optimizers one after the other while the next one's gradient is on its way.

    Gradients and shards pass through two buffers each, as long as the longest shard and, for a
    GPU, pinned: a copy from or to other host memory would make the host wait. Only these are
    pinned, for torch rounds pinned blocks up to powers of two.
    """

    def __init__(self, optimizers: Sequence[HostOptimizer]) -> None:
        self._optimizers = optimizers
        shard = max((o.shard for o in optimizers), key=Tensor.numel)
        self._longest = shard
        # Made at the first step: a gradient is in the dtype it was reduced in.
        self._gradients: list[Tensor] = []
        self._shards = [_staging(shard, shard.dtype) for _ in range(_BUFFERS)]
        self._cast = torch.empty(shard.numel(), dtype=torch.float32)
        self._stream = torch.cuda.Stream(shard.device) if shard.is_cuda else None
        self._came: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._left: list[torch.cuda.Event | None] = [None] * _BUFFERS

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Step all; what is computed on the device from then on finds the new shards."""
        with using_threads(host_threads()):
            self._step(gradients)

    def _step(self, gradients: Sequence[Tensor]) -> None:
        if not self._gradients:
            dtype = gradients[0].dtype
            self._gradients = [_staging(self._longest, dtype) for _ in range(_BUFFERS)]
        if self._stream is not None:
            # All gradients are there once what was computed so far is done.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._fetch(0, gradients[0])
        for index, optimizer in enumerate(self._optimizers):
            if index + 1 < len(gradients):
                self._fetch(index + 1, gradients[index + 1])
            optimizer.step(self._fetched(index, optimizer.values.numel()))
            self._send(index, optimizer)

    def host_bytes(self) -> int:
        """Bytes of the buffers, without the rounding of pinned ones, and of all optimizers."""
        own = storage_bytes([*self._gradients, *self._shards, self._cast])
        return own + sum(optimizer.host_bytes() for optimizer in self._optimizers)

    def _fetch(self, index: int, gradient: Tensor) -> None:
        buffer = self._gradients[index % _BUFFERS][: gradient.numel()]
        if self._stream is None:
            buffer.copy_(gradient)
            return
        with torch.cuda.stream(self._stream):
            buffer.copy_(gradient, non_blocking=True)
        self._came[index % _BUFFERS] = self._stream.record_event()

    def _fetched(self, index: int, numel: int) -> Tensor:
        """Wait for a gradient and return it in fp32."""
        came = self._came[index % _BUFFERS]
        if came is not None:
            came.synchronize()
        return self._cast[:numel].copy_(self._gradients[index % _BUFFERS][:numel])

    def _send(self, index: int, optimizer: HostOptimizer) -> None:
        left = self._left[index % _BUFFERS]
        if left is not None:
            left.synchronize()
        buffer = self._shards[index % _BUFFERS][: optimizer.shard.numel()]
        buffer.copy_(optimizer.values)
        optimizer.shard.copy_(buffer, non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            self._left[index % _BUFFERS] = current.record_event()


def _staging(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(shard.numel(), dtype=dtype, pin_memory=shard.is_cuda)


def host_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads step a rank's shard: half of its share of the CPUs it may use.

    torchrun leaves one to each of several ranks (OMP_NUM_THREADS), which is too few: 25 million
    elements took it 62 ms, 16 threads 10 ms and 32 threads 8 ms on the 32 CPUs beside two H200s.
    All of them is too many: each operation ends with its last thread, and where other processes
    computed too, steps took 24 ms for 25 million elements and for 6 million alike.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // (2 * ranks))


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Let torch compute on the CPU with `number` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_offload(stage: int, optimizer: str, precision: str) -> None:
    """Raise ValueError where the optimizer is not stepped on the host."""
    if stage == 0:
        raise ValueError("stage 0 shards no optimizer to offload: use stage 1, 2 or 3")
    if optimizer != OFFLOADED_KIND:
        raise ValueError(f"{optimizer} is not stepped on the host: use {OFFLOADED_KIND}")
    if precision == "bf16":
        raise ValueError("bf16 has no fp32 values to step on the host: use mixed, fp32 or autocast")
