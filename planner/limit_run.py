"""The largest that fits, proven by short runs: what to try next, and what the runs so far have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.checks import check_integer, check_mapping
from planner.errors import PlanError
from planner.plan import MAX_TOKENS_PER_SEQUENCE, Plan
from planner.reach import REACHES, STEPS, WORDS

FITS, OUT_OF_MEMORY, NOT_PLANNED = "done", "oom_device", "not_planned"
# Doubling from a prediction that is near, and halving back: ten runs are 2^4 steps away and back.
MAX_RUNS = 16
# Other worlds hold on the device what the plan's ranks would not, or have no device.
WORLDS = ("nccl", "solo")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRun:
    """The field of a plan (one of `REACHES`) whose limit is looked for, in at most `max_runs` runs.

    `predicted` is the largest value with the verdict "fits", `edge` the largest that is predicted to
    run at all, with no room to spare (`planner.reach.largest_that_runs`): the search begins there. None
    where not even the smallest is predicted to; without an edge the search begins at `predicted`.
    """

    name: str
    predicted: int | None
    edge: int | None = None
    max_runs: int = MAX_RUNS

    @property
    def step(self) -> int:
        """The difference between values that are told apart."""
        return STEPS[self.name][0]

    @property
    def most(self) -> int:
        """The largest value that a plan can have, a multiple of the step."""
        step, most = STEPS[self.name]
        return most // step * step

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as a job spec holds it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One short run: the value, how it ended, and device bytes predicted and measured (GPU, worst rank)."""

    value: int
    outcome: str
    predicted_bytes: int | None
    device_bytes: int | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def parse_limit(given: object, plan: Plan, world: str) -> LimitRun:
    """Read a spec's `limit`; raises PlanError naming the field at fault."""
    values = check_mapping("limit", given, frozenset(LimitRun.__dataclass_fields__))
    name, predicted = values.get("name"), values.get("predicted")
    if name not in REACHES:
        raise PlanError("limit.name", name, "one of " + ", ".join(REACHES))
    if plan.job != "train":
        raise PlanError("job", str(plan.job), "train, as training steps are tried")
    if name == "num_layers" and plan.model.trace is not None:
        sentence = "limit.name is 'num_layers': the depth of a traced model cannot be changed."
        raise PlanError("limit.name", name, "micro_batch or sequence_length", sentence=sentence)
    if world not in WORLDS:
        sentence = (
            f"world is '{world}': what fits a GPU is proven on one, in the world nccl or solo."
        )
        raise PlanError("world", world, "nccl or solo", sentence=sentence)
    edge = values.get("edge")
    for field, value in (("limit.predicted", predicted), ("limit.edge", edge)):
        if value is not None:
            check_integer(field, value, 1, MAX_TOKENS_PER_SEQUENCE)
    runs = check_integer("limit.max_runs", values.get("max_runs", MAX_RUNS), 1, 64)
    return LimitRun(name=str(name), predicted=predicted, edge=edge, max_runs=runs)


def bracket(trials: Sequence[Trial]) -> tuple[int, int | None]:
    """Return the largest value that ran (0: none) and the smallest that could not (None: none)."""
    refused = [one.value for one in trials if one.outcome in (OUT_OF_MEMORY, NOT_PLANNED)]
    ran = [one.value for one in trials if one.outcome == FITS]
    return max(ran, default=0), min(refused, default=None)


def next_value(run: LimitRun, trials: Sequence[Trial]) -> int | None:
    """Return the value to try next; None where the limit is known or no more runs are allowed.

    Begins at the predicted edge, doubles the way from there until runs of both outcomes are seen, then
    halves between them: two runs where the prediction is right. The limit is known where the next value
    ran out of memory, or is none.
    """
    step, most = run.step, run.most
    if len(trials) >= run.max_runs:
        return None
    if not trials:
        return min(max(step, (run.edge or run.predicted or 0) // step * step), most)
    low, high = bracket(trials)
    way = (2 ** (len(trials) - 1)) * step
    if high is None:
        return None if low == most else min(low + way, most)
    if low == 0:
        return None if high == step else max(high - way, step)
    return None if high - low <= step else low + (high - low) // (2 * step) * step


def limit_of(run: LimitRun, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return what runs have shown, as a result holds it: `proven` is None while it is not known."""
    low, high = bracket(trials)
    step = run.step
    is_known = (high is None and low == run.most) or (high is not None and high - low <= step)
    return {
        **run.to_dict(),
        "step": step,
        "proven": low if is_known else None,
        "largest_that_ran": low or None,
        "smallest_that_did_not": high,
        "trials": [one.to_dict() for one in trials],
    }


def limit_sentence(found: Mapping[str, Any]) -> str:
    """Return a limit proven and predicted, in words."""
    noun, unit, _ = WORDS[found["name"]]
    runs = len(found["trials"])
    number = f"{runs} short run{'' if runs == 1 else 's'}"
    low, high = found["largest_that_ran"], found["smallest_that_did_not"]
    if found["proven"] == 0:
        said = f"No {noun} fits: the smallest ran out of memory"
    elif found["proven"] is not None:
        said = f"The largest {noun} that fits is {low:,}{unit}, {_next_words(found)}"
    elif low and high:
        said = (
            f"The largest {noun} that fits is between {low:,} and {high:,}{unit}: not told nearer"
        )
    elif low:
        said = f"The largest {noun} that fits is at least {low:,}{unit}: none ran out of memory"
    elif high:
        said = f"The largest {noun} that fits is below {high:,}{unit}: none ran"
    else:
        return f"The largest {noun} that fits is not proven: no run has ended."
    return f"{said} (proven by {number}). {_predicted_words(found)}"


def _next_words(found: Mapping[str, Any]) -> str:
    """Say what became of the value after the limit."""
    ended = {one["value"]: one["outcome"] for one in found["trials"]}
    high = found["smallest_that_did_not"]
    if high is None or ended[high] == NOT_PLANNED:
        return "the largest that can be planned"
    return f"{high:,} ran out of memory"


def _predicted_words(found: Mapping[str, Any]) -> str:
    unit, predicted = WORDS[found["name"]][1], found["predicted"]
    if predicted is None:
        return "Predicted: none fits."
    sentence = f"Predicted with the verdict 'fits': {_beside(predicted, unit, found['proven'])}"
    edge = found.get("edge")
    if edge is None or edge == predicted:
        return f"{sentence}."
    return f"{sentence}; to run with no room to spare: {_beside(edge, unit, found['proven'])}."


def _beside(value: int, unit: str, proven: int | None) -> str:
    """Return a predicted value, and how far it is from the proven one."""
    if not proven:
        return f"{value:,}{unit}"
    percent = 100 * (value / proven - 1)
    place = f"{abs(percent):.1f} % {'above' if percent > 0 else 'below'} it"
    return f"{value:,}{unit}, {'as proven' if value == proven else place}"
