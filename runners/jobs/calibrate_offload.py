"""What `calibrate` measures of an optimizer in host memory: a shard's update, by size and threads.

A gradient in bf16 is cast to fp32, AdamW steps, and the value is cast back: what runners/zero/offload.py
does for each group of parameters between the copies to and from the device, which are measured apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from runners.jobs.calibrate_case import DTYPES, HostCase
from runners.jobs.stopwatch import Work
from runners.zero.offload import HostOptimizer, host_threads, using_threads

# Gradient read in bf16 and written in fp32, AdamW's seven passes in fp32, value read and written in bf16.
_ELEMENT_BYTES = 2 + 4 + 7 * 4 + 4 + 2
_SIZES = tuple(2**power for power in (18, 20, 22, 24, 25))
_SIZE_OF_FEWER_THREADS = 2**22
_LR = 1e-4


def offload_cases(is_cuda: bool) -> Iterator[HostCase]:
    """Yield updates of several sizes by as many threads as a rank alone takes, and one by fewer.

    Shapes are [elements, threads]. A CPU gets one small update.
    """
    threads = host_threads()
    if not is_cuda:
        yield _case(2**16, 1)
        return
    for elements in _SIZES:
        yield _case(elements, threads)
    while (threads := threads // 2) >= 1:
        yield _case(_SIZE_OF_FEWER_THREADS, threads)


def _case(elements: int, threads: int) -> HostCase:
    return HostCase(
        group="offload",
        operation="host_update",
        shape=(elements, threads),
        dtype="bf16",
        bytes=_ELEMENT_BYTES * elements,
        flops=0.0,
        prepare=partial(_update, elements, threads),
    )


def _update(elements: int, threads: int, device: torch.device) -> Work:
    is_pinned = device.type == "cuda"
    gradient, shard = (
        torch.zeros(elements, dtype=DTYPES["bf16"], pin_memory=is_pinned) for _ in range(2)
    )
    optimizer, cast = HostOptimizer(shard, lr=_LR), torch.empty(elements)

    def work() -> None:
        with using_threads(threads):
            optimizer.step(cast.copy_(gradient))
            shard.copy_(optimizer.values)

    return work
