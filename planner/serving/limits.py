"""How far a serving choice can speed a decode step up, and what keeps it from doing so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.serving.times import StepPart, StepTimes

_WORDS = {
    "products": "reading the layers' weights",
    "head": "the product with the vocabulary",
    "elementwise": "the small kernels",
    "attention": "attention over the cache",
    "all_reduce": "adding up between the GPUs",
    "host_waiting": "the host, which starts the kernels",
}
# Parts that change by less than this share of the step are not what a choice is about.
_NOTICED = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What one choice does to a decode step: `speed_up` is the step before over the step after.

    `part` is what it changes most, `share` how much of the step before that is. `most` is the speed-up if
    that part took no time at all, `byte_factor` how many times fewer bytes it reads; None where it reads none.
    `sentence` says it in words.
    """

    part: str
    share: float
    speed_up: float
    most: float
    byte_factor: float | None
    sentence: str


def decode_limit(
    before: StepTimes, after: StepTimes, batch: int, total_context_tokens: int
) -> Limit:
    """Compare a step of `batch` sequences, holding so many tokens together, before and after a choice."""
    first = _by_name(before.decode_parts(batch, total_context_tokens))
    second = _by_name(after.decode_parts(batch, total_context_tokens))
    step_s, after_s = (sum(part.time_s for part in parts.values()) for parts in (first, second))
    name = max(first, key=lambda one: abs(first[one].time_s - _time_s(second, one)))
    part, share = first[name], first[name].time_s / step_s
    now = second.get(name)
    byte_factor = part.bytes / now.bytes if now is not None and now.bytes and part.bytes else None
    limit = Limit(
        part=name,
        share=share,
        speed_up=step_s / after_s,
        most=1.0 / (1.0 - share),
        byte_factor=byte_factor,
        sentence="",
    )
    times_s = (part.time_s, _time_s(second, name), step_s)
    return replace(limit, sentence=_sentence(limit, *times_s, _added(first, second)))


def _by_name(parts: tuple[StepPart, ...]) -> dict[str, StepPart]:
    return {part.name: part for part in parts}


def _time_s(parts: Mapping[str, StepPart], name: str) -> float:
    return parts[name].time_s if name in parts else 0.0


def _added(first: Mapping[str, StepPart], second: Mapping[str, StepPart]) -> str | None:
    """The part that only the step after has."""
    return next((name for name in second if name not in first), None)


def _sentence(
    limit: Limit, before_s: float, after_s: float, step_s: float, added: str | None
) -> str:
    what = _WORDS[limit.part]
    if abs(before_s - after_s) < _NOTICED * step_s and added is None:
        return "A decode step takes as long as before."
    share = f"{what} is {100 * limit.share:.0f} % of a step"
    moved = ""
    if limit.byte_factor is not None and abs(limit.byte_factor - 1) > _NOTICED:
        moved = f" and moves {limit.byte_factor:.2f} times fewer bytes"
        if limit.byte_factor < 1:
            moved = f" and moves {1 / limit.byte_factor:.2f} times as many bytes"
    if after_s > before_s:
        reason = " all the same" if limit.byte_factor and limit.byte_factor > 1 else ""
        return f"{share}{moved}; it takes {after_s / before_s:.2f} times as long{reason}."
    own = f"it takes {after_s / before_s:.2f} of its time"
    rest = f"at most x{limit.most:.2f} if it took none"
    beside = f"; {_WORDS[added]} comes on top" if added else ""
    return f"{share}{moved}: {own}, and a step could gain {rest}{beside}."
