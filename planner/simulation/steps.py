"""Step times remembered: a long trace asks for the same few thousand steps again and again."""

from __future__ import annotations

from functools import lru_cache

from planner.simulation.server import StepTime

# Contexts at which a decode step is asked for; between them its time goes by a straight line.
_GRAIN_TOKENS = 1024
_REMEMBERED = 1 << 16


class RememberedSteps:
    """Prefill and decode times of `times`, each looked up once, those of decoding between alike contexts.

    A chunk takes the time of the next multiple of `part_tokens`: the graph that runs it is as long.
    """

    def __init__(self, times: StepTime, part_tokens: int = 1) -> None:
        self._part_tokens = part_tokens
        self._empty_s = times.step_s(0, 0, 0, 0)
        self._prefill_s = lru_cache(_REMEMBERED)(
            lambda tokens, context, waits: (
                times.step_s(tokens, context, 0, 0, waits) - self._empty_s
            )
        )
        self._decode_s = lru_cache(_REMEMBERED)(
            lambda batch, grains: times.step_s(0, 0, batch, grains * _GRAIN_TOKENS) - self._empty_s
        )

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context_total: int,
        waits: bool = True,
    ) -> float:
        """Return the seconds of one step: a chunk's forward, the decode's, and what every step takes."""
        total_s = self._empty_s
        if prefill_tokens:
            padded = -(-prefill_tokens // self._part_tokens) * self._part_tokens
            total_s += self._prefill_s(padded, prefill_context, waits)
        if decode_batch:
            grains, rest = divmod(decode_context_total, _GRAIN_TOKENS)
            before_s = self._decode_s(decode_batch, grains)
            after_s = self._decode_s(decode_batch, grains + 1)
            total_s += before_s + (after_s - before_s) * rest / _GRAIN_TOKENS
        return total_s
