"""Step times remembered: a long trace asks for the same few thousand steps again and again."""

from __future__ import annotations

from functools import lru_cache

from planner.simulation.server import StepTime

# Contexts are rounded to so many tokens: of an 8B model 2 MiB and 32 MiB of cache, microseconds.
_PREFILL_GRAIN, _DECODE_GRAIN = 16, 256
_REMEMBERED = 1 << 16


class RememberedSteps:
    """Prefill and decode times of `times`, each looked up once for alike contexts.

    A chunk takes the time of the next multiple of `part_tokens`: the graph that runs it is as long.
    """

    def __init__(self, times: StepTime, part_tokens: int = 1) -> None:
        self._part_tokens = part_tokens
        self._prefill_s = lru_cache(_REMEMBERED)(
            lambda tokens, context: times.step_s(tokens, context * _PREFILL_GRAIN, 0, 0)
        )
        self._decode_s = lru_cache(_REMEMBERED)(
            lambda batch, context: times.step_s(0, 0, batch, context * _DECODE_GRAIN)
        )

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context_total: int,
    ) -> float:
        """Return the seconds of one step: a chunk's forward, then the decode's."""
        total_s = 0.0
        if prefill_tokens:
            padded = -(-prefill_tokens // self._part_tokens) * self._part_tokens
            total_s += self._prefill_s(padded, round(prefill_context / _PREFILL_GRAIN))
        if decode_batch:
            total_s += self._decode_s(decode_batch, round(decode_context_total / _DECODE_GRAIN))
        return total_s
