"""How far a serving choice can speed a decode step up, and what keeps it from doing so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.serving.times import StepPart, StepTimes

_WORDS = {
    "products": "reading the layers' weights",
    "head": "the product with the vocabulary",
    "elementwise": "the small kernels",
    "attention": "attention over the cache",
    "all_reduce": "adding up between the GPUs",
    "all_gather": "gathering the logits",
    "host_waiting": "the host that starts the kernels",
}
# Parts that change by less than this share of the step are not what a choice is about.
_NOTICED = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What one choice does to a decode step: `speed_up` is the step before over the step after.

    `part` is what it changes most, `share` how much of the step before all that it changes is. `most` is the
    speed-up if all that took no time, `byte_factor` how many times fewer bytes `part` reads; None where it
    reads none. `sentence` says it in words.
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
    step_s, after_s = _total_s(first.values()), _total_s(second.values())
    gained_s = {name: part.time_s - _time_s(second, name) for name, part in first.items()}
    name = max(gained_s, key=lambda one: abs(gained_s[one]))
    changed = [one for one in first if abs(gained_s[one]) > _NOTICED * step_s]
    share = sum(first[one].time_s for one in changed) / step_s
    part, now = first[name], second.get(name)
    limit = Limit(
        part=name,
        share=share,
        speed_up=step_s / after_s,
        most=1.0 / max(1.0 - share, _NOTICED),
        byte_factor=part.bytes / now.bytes if now and now.bytes and part.bytes else None,
        sentence="",
    )
    added = [_WORDS[one] for one in second if one not in first]
    ratio = _time_s(second, name) / part.time_s
    return replace(limit, sentence=_sentence(limit, ratio, len(changed), added))


def _by_name(parts: tuple[StepPart, ...]) -> dict[str, StepPart]:
    return {part.name: part for part in parts}


def _time_s(parts: Mapping[str, StepPart], name: str) -> float:
    return parts[name].time_s if name in parts else 0.0


def _total_s(parts: Iterable[StepPart]) -> float:
    return sum(part.time_s for part in parts)


def _sentence(limit: Limit, ratio: float, changed: int, added: list[str]) -> str:
    comes = "comes" if len(added) == 1 else "come"
    beside = f"{' and '.join(added)} {comes} on top" if added else ""
    if not changed:
        return f"{beside.capitalize() or 'A decode step takes as long as before'}."
    what, share = _WORDS[limit.part], f"Of a step {100 * limit.share:.0f} %"
    is_one = changed == 1
    text = f"{share} is {what}: it" if is_one else f"{share} changes, most of it {what}: that"
    text += f" takes {ratio:.2f} of its time"
    factor = limit.byte_factor or 1.0
    if factor > 1 + _NOTICED:
        text += f" with {factor:.2f} times fewer bytes"
    elif factor < 1 - _NOTICED:
        text += f" with {1 / factor:.2f} times as many bytes"
    if limit.speed_up > 1:
        free = "it" if is_one else "all of this"
        text += f"; were {free} free, a step would be {limit.most:.2f} times as fast"
    return f"{text}; {beside}." if beside else f"{text}."
