"""The planner's allocator, asked block by block: the whole program is served anew every time."""

from __future__ import annotations

from planner.memory.execution import BEGIN_STEP
from planner.memory.recorder import Block, Recorder, Served


class Allocator:
    """Takes and gives blocks, and says where they are."""

    def __init__(self, capacity_bytes: int | None = None, is_expandable: bool = False) -> None:
        self._recorder = Recorder(capacity_bytes, is_expandable)
        self._addresses: dict[Block, int] = {}

    @property
    def now(self) -> Served:
        """What became of all that was asked for so far."""
        return self._recorder.serve()

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Take a block; raises ReplayedOutOfMemoryError where there is no memory for it."""
        block = self._recorder.allocate(size_bytes, stream)
        self._addresses[block], _ = self.now.block(block.slot)
        return block

    def release(self, block: Block) -> None:
        """Give a block back."""
        self._recorder.release(block)

    def empty_cache(self) -> None:
        """Give back what is cached."""
        self._recorder.empty_cache()

    def reset_peak(self) -> None:
        """Begin a step."""
        self._recorder.record(BEGIN_STEP, 0)

    def address(self, block: Block) -> int:
        """Where a block is, or was."""
        return self._addresses[block]
