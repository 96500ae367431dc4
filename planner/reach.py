"""How far a plan goes: the largest micro-batch, sequence and number of layers that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import PlanError
from planner.plan import MAX_COUNT, MAX_TOKENS_PER_SEQUENCE, Plan, parse_plan
from planner.predict import Prediction, predict
from planner.units import format_count
from planner.verdict import COMFORTABLE_HEADROOM, SMALL_HEADROOM, State

# Shorter steps of a sequence's length are not worth a replay.
TOKENS_STEP = 128
_MOST_LAYERS = 4096
# How often a depth is looked for on a line.
_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The largest value of one field with the verdict "fits", all else as planned.

    `value` is None where not even the smallest fits. `stopped_by` says why the next larger value is
    no answer; `parameters` are those of the model with `value`.
    """

    name: str
    value: int | None
    device_bytes: int | None
    parameters: int | None
    stopped_by: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def sentence(self) -> str:
        """Return the answer in words."""
        words = WORDS[self.name]
        if self.value is None:
            reason = self.stopped_by.removeprefix("Does not fit: ")
            return f"No {words[0]} fits. The smallest: {reason}"
        size = f" ({format_count(self.parameters or 0)} parameters)" if words[2] else ""
        return f"The largest {words[0]} that fits: {self.value:,}{words[1]}{size}."


# Noun, unit, and whether the model changes.
WORDS: Mapping[str, tuple[str, str, bool]] = {
    "micro_batch": ("micro-batch", "", False),
    "sequence_length": ("sequence", " tokens", False),
    "num_layers": ("number of layers", " layers", True),
}
# The step in which a value is looked for, and the largest.
STEPS: Mapping[str, tuple[int, int]] = {
    "micro_batch": (1, MAX_COUNT),
    "sequence_length": (TOKENS_STEP, MAX_TOKENS_PER_SEQUENCE),
    "num_layers": (1, _MOST_LAYERS),
}
REACHES = tuple(STEPS)


def largest_that_fits(plan: Plan, name: str) -> Reach:
    """Return the largest value of one of `REACHES` that fits, by bisection of single predictions.

    The formulas, with the plan's share of segments, say where to look; the answer and the next value
    are replayed. Lengths are multiples of 128. Raises PlanError for a serving plan.
    """
    if plan.job != "train":
        raise PlanError("job", str(plan.job), "train, as training steps are bisected")
    step, most = STEPS[name]
    memory = predict(plan).memory
    share = memory["reserved_bytes"] / memory["allocated_bytes"] - 1
    tried: dict[int, Prediction | PlanError] = {}

    def answer(number: int) -> Prediction | PlanError:
        if number not in tried:
            tried[number] = _predicted(plan, name, number * step)
        return tried[number]

    if name == "num_layers":
        guess = _depth_on_a_line(plan, share, answer)
    else:
        guess = bisect_largest(
            lambda number: _fits(_predicted(plan, name, number * step, share)), most // step
        )
    count = largest_near(lambda number: _fits(answer(number)), guess, most // step)
    following = answer(min(count + 1, most // step))
    found = answer(count) if count else None
    return Reach(
        name=name,
        value=count * step or None,
        device_bytes=found.memory["device_bytes"] if isinstance(found, Prediction) else None,
        parameters=found.plan.model.parameters if isinstance(found, Prediction) else None,
        stopped_by=_stop(following),
    )


def largest_that_runs(plan: Plan, name: str, near: int | None) -> int | None:
    """Return the largest value of one of `REACHES` predicted to run with no room to spare, looked for from `near`.

    The replay ends where the GPU's memory does, and gives cached segments back before that, as the
    allocator does. None where not even the smallest runs.
    """
    step, most = STEPS[name]
    capacity_bytes = plan.hardware.visible_bytes

    def needs(number: int) -> int | None:
        found = _predicted(plan, name, number * step)
        return int(found.memory["device_bytes"]) if isinstance(found, Prediction) else None

    def runs(number: int) -> bool:
        needed_bytes = needs(number)
        return needed_bytes is not None and needed_bytes <= capacity_bytes

    guess = (near or 0) // step
    half_bytes, near_bytes = needs(guess // 2) if guess > 1 else None, needs(guess)
    if half_bytes and near_bytes and near_bytes > half_bytes:
        # On a line, as few depths as can be are looked at: each has a template of its own.
        slope_bytes = (near_bytes - half_bytes) / (guess - guess // 2)
        guess = min(guess + max(0, int((capacity_bytes - near_bytes) / slope_bytes)), most // step)
    return largest_near(runs, guess, most // step) * step or None


def _depth_on_a_line(
    plan: Plan, share: float, answer: Callable[[int], Prediction | PlanError]
) -> int:
    """Return about how many layers fit, if each took what those beyond the model's own take.

    The line goes through the model's own depth and, by the formulas, twice that; then through the
    last two depths that `answer` replayed. A depth's template is compiled anew, which takes longer
    than all else, so few are looked at.
    """
    depth, _, most = plan.model.num_layers, *STEPS["num_layers"]
    found, deeper = predict(plan), _predicted(plan, "num_layers", 2 * depth, share)
    if isinstance(deeper, PlanError):
        return depth
    layer_bytes = _slope_bytes(found, deeper, depth)
    for _ in range(_LINES):
        guess = min(max(1, depth + math.floor(_room_bytes(found) / layer_bytes)), most)
        other = answer(guess)
        if guess == depth or isinstance(other, PlanError):
            break
        layer_bytes = _slope_bytes(found, other, guess - depth)
        depth, found = guess, other
    return depth


def _slope_bytes(found: Prediction, other: Prediction, layers: int) -> float:
    """Return how much more a layer needs, where `other` has so many more of them."""
    return max(1.0, (other.verdict.needed_bytes - found.verdict.needed_bytes) / layers)


def _room_bytes(found: Prediction) -> float:
    """Return how much more a prediction may need with the verdict "fits"; negative: less."""
    verdict = found.verdict
    if verdict.high_bytes is None:
        return verdict.capacity_bytes * (1 - COMFORTABLE_HEADROOM) - verdict.needed_bytes
    comfortable_bytes = verdict.capacity_bytes * (1 - SMALL_HEADROOM)
    return min(
        comfortable_bytes - verdict.needed_bytes, verdict.capacity_bytes - verdict.high_bytes
    )


def bisect_largest(fits: Callable[[int], bool], most: int) -> int:
    """Return a number up to `most` that fits while the next does not; 0 where 1 does not fit.

    Doubles from 1 to the first that does not fit, then halves between it and the last that did.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_near(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Return as `bisect_largest` does, beginning at a `guess` and doubling the way from there."""
    if guess and not fits(guess):
        low, high, way = guess - 1, guess, 1
        while low > 0 and not fits(low):
            low, high, way = max(0, low - 2 * way), low, 2 * way
    else:
        low, high, way = guess, guess + 1, 1
        while high <= most and fits(high):
            low, high, way = high, high + 2 * way, 2 * way
        high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(found: Prediction | PlanError) -> bool:
    return isinstance(found, Prediction) and found.verdict.state is State.FITS


def plan_reaching(plan: Plan, name: str, value: int) -> Plan:
    """Return a plan with another value of one of `REACHES`; raises PlanError where it cannot be planned."""
    document = plan.to_dict()
    if name == "num_layers":
        overrides = {**document["model"].get("overrides", {}), "num_hidden_layers": value}
        document["model"] = {**document["model"], "overrides": overrides}
    else:
        document["workload"] = {**document["workload"], name: value}
    return replace(parse_plan(document), hardware=plan.hardware)


def _predicted(
    plan: Plan, name: str, value: int, segment_share: float | None = None
) -> Prediction | PlanError:
    try:
        return predict(plan_reaching(plan, name, value), segment_share=segment_share)
    except PlanError as problem:
        return problem


def _stop(following: Prediction | PlanError) -> str:
    """Say why the value after the answer is none."""
    if isinstance(following, PlanError):
        return str(following)
    return following.verdict.sentence
