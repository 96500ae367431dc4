"""The stream that collectives run on, beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """Runs collectives beside the computation, ordered by events: the host waits for nothing.

    All tensors are allocated and freed on the computing stream, so that what the allocator does
    does not depend on time: who frees what the side stream uses calls `wait` before. On a CPU, and
    for one rank alone, which has nobody to wait for, work runs at once.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and world_size > 1:
            # Before other kernels in the queue of a busy GPU: somebody waits for its end.
            self._stream = torch.cuda.Stream(device, priority=-1)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Start `work` after all that was computed so far; returns the event of its end."""
        if self._stream is None:
            work()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
        end: torch.cuda.Event = self._stream.record_event()
        return end

    def wait(self, end: torch.cuda.Event | None) -> None:
        """Let what is computed from here on wait for the work that `end` came from."""
        if end is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(end)
