"""The buffers of collectives inside the layers, replayed around each section of a step."""

from __future__ import annotations

from typing import Any

from planner.memory.beside import Beside
from planner.memory.groups import Place
from planner.memory.replay import Blocks, EngineReplay, Memory


class BufferedEngine:
    """An engine's replay that holds the buffers of a section's collectives while it runs."""

    def __init__(self, engine: EngineReplay, memory: Memory, beside: Beside) -> None:
        self._engine, self._memory, self._beside = engine, memory, beside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def before(self, section: str, layer: int) -> None:
        """Let the engine gather, then take the section's buffers."""
        self._engine.before(section, layer)
        for number, size_bytes in enumerate(self._sizes_bytes(section, layer)):
            self._memory.take(("collective", number), size_bytes)

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Free the section's buffers, then let the engine reduce."""
        numbers = range(len(self._sizes_bytes(section, layer)))
        self._memory.give(*(("collective", number) for number in numbers))
        self._engine.after(section, layer, gradients)

    def _sizes_bytes(self, section: str, layer: int) -> list[int]:
        return self._beside.buffers_bytes(_place(section, layer))


def _place(section: str, layer: int) -> Place:
    """The place of a section; layers of every kind are told apart by their number alone."""
    if "layer" not in section:
        return Place(section)
    return Place("layer_backward" if section.endswith("_backward") else "layer", layer)
