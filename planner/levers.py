"""What single changes of a plan save and cost, what would make it fit, each from its own prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, groupby, islice
from typing import Any

from planner.changes import Change, Kind, changes_of, more_gpus
from planner.errors import PlanError
from planner.memory.parallel import group_size
from planner.plan import Plan
from planner.predict import Prediction, predict
from planner.units import format_bytes
from planner.verdict import State

MOST_SHOWN = 4
# Of changes that fit by the formulas, so many are replayed at most.
MOST_REPLAYED = 12
# Of the pairs on one number of GPUs, those that need the least get a third change beside them.
_EXTENDED = 3
# Numbers of GPUs that are tried where none of the single changes fits.
_FAR_FACTORS = (16, 32, 64, 128)
_NOTICED_SHARE = 0.002
_NOTICED_SPEEDUP = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A changed plan beside the plan it changes: bytes per GPU saved, and what it costs in time.

    `step_ratio` is the new step's time over the old one's, `cost_ratio` the same of GPU-seconds per
    token; they are equal where GPUs and tokens of a step stay.
    """

    change: Change
    plan: Plan
    state: State
    device_bytes: int
    saved_bytes: int
    step_time_s: float
    step_ratio: float
    cost_ratio: float
    gpu_ratio: float

    @property
    def is_same_work(self) -> bool:
        """Whether a step trains the same tokens on as many GPUs."""
        return self.gpu_ratio == 1 and abs(self.step_ratio - self.cost_ratio) < 1e-9

    def effect(self, show: Callable[[int], str] = format_bytes) -> str:
        """Return what it saves and costs, such as "-31.00 GiB, +27 % step"."""
        sign = "-" if self.saved_bytes >= 0 else "+"
        return f"{sign}{show(abs(self.saved_bytes))}, {self.time_words()}"

    def time_words(self) -> str:
        """Return what it costs in time: of the step, or of tokens per second where work differs."""
        if self.is_same_work:
            return f"{_percent(self.step_ratio)} step"
        speed = self.gpu_ratio / self.cost_ratio
        return f"{_percent(speed)} tokens/s"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "change": self.change.words,
            "kind": str(self.change.kind),
            "caution": self.change.caution,
            "effect": self.effect(),
            "state": str(self.state),
            "device_bytes": self.device_bytes,
            "saved_bytes": self.saved_bytes,
            "step_time_s": self.step_time_s,
            "step_ratio": self.step_ratio,
            "cost_ratio": self.cost_ratio,
            "gpu_ratio": self.gpu_ratio,
            "plan": self.plan.to_dict(),
        }


def _percent(ratio: float) -> str:
    """Return how far a ratio is from 1, such as "+27 %"."""
    percent = round(100 * (ratio - 1))
    return f"{percent:+d} %" if percent else "±0 %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What makes a plan fit, the smallest first: single changes, else two or three; of the algorithm apart.

    Smallest: the fewest GPUs more, then nothing else changed, then the least time per token. `closest`
    is the single change that needs the least memory where nothing fits.
    """

    singles: tuple[Lever, ...]
    pairs: tuple[Lever, ...]
    triples: tuple[Lever, ...]
    algorithms: tuple[Lever, ...]
    closest: Lever | None

    @property
    def system(self) -> tuple[Lever, ...]:
        """The fewest changes of the system that make it fit; none where not even three do."""
        return self.singles or self.pairs or self.triples

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "singles": [lever.to_dict() for lever in self.singles],
            "pairs": [lever.to_dict() for lever in self.pairs],
            "triples": [lever.to_dict() for lever in self.triples],
            "algorithms": [lever.to_dict() for lever in self.algorithms],
            "closest": None if self.closest is None else self.closest.to_dict(),
        }


def levers_of(
    plan: Plan, prediction: Prediction | None = None, *, replay: bool = True
) -> list[Lever]:
    """Return every single change that can be planned, those that save the most bytes first.

    Each is predicted with its allocator replayed, tens of milliseconds each; without `replay` its
    segments are the plan's share of the allocated peak. Raises PlanError for a serving plan.
    """
    before = prediction or predict(plan)
    share = None if replay else _segment_share(before)
    found = [lever for change in changes_of(plan) if (lever := _lever(before, change, share))]
    return sorted(found, key=lambda lever: -lever.saved_bytes)


def _lever(before: Prediction, change: Change, segment_share: float | None = None) -> Lever | None:
    """Return a change beside its plan; None where it cannot be planned."""
    with suppress(PlanError):
        plan = change.applied_to(before.plan)
        after = predict(plan, segment_share=segment_share)
        needed = after.memory["device_bytes"]
        old, new = before.throughput, after.throughput
        return Lever(
            change=change,
            plan=plan,
            state=after.verdict.state,
            device_bytes=needed,
            saved_bytes=before.memory["device_bytes"] - needed,
            step_time_s=new.step_time_s,
            step_ratio=new.step_time_s / old.step_time_s,
            cost_ratio=old.tokens_per_s_per_gpu / new.tokens_per_s_per_gpu,
            gpu_ratio=_gpus(plan) / _gpus(before.plan),
        )
    return None


def _gpus(plan: Plan) -> int:
    return plan.parallelism.world_size * group_size(plan.parallelism)


def of_kind(levers: Iterable[Lever], kind: Kind) -> list[Lever]:
    """Return the levers of the system or of the algorithm."""
    return [lever for lever in levers if lever.change.kind is kind]


def saving(levers: Iterable[Lever], capacity_bytes: int) -> list[Lever]:
    """Return the levers that save a noticeable part of the GPU, most first."""
    least = _NOTICED_SHARE * capacity_bytes
    found = [lever for lever in levers if lever.saved_bytes > least]
    return sorted(found, key=lambda lever: -lever.saved_bytes)


def speeding(levers: Iterable[Lever]) -> list[Lever]:
    """Return the levers that still fit and take less GPU time per token, most first.

    Fewer GPUs, which do so too, would take longer.
    """
    found = [
        lever
        for lever in levers
        if lever.state is State.FITS
        and lever.cost_ratio < 1 - _NOTICED_SPEEDUP
        and lever.gpu_ratio >= 1
    ]
    return sorted(found, key=lambda lever: lever.cost_ratio)


def remedies(plan: Plan, levers: Sequence[Lever], prediction: Prediction | None = None) -> Remedies:
    """Return the smallest changes that make a plan fit; `levers` are its own.

    Where no single change of the system fits, many more GPUs are tried, then pairs, then a third change
    beside the closest pairs, by the formulas with the plan's share of segments. Whatever is returned
    was replayed.
    """
    before = prediction or predict(plan)
    system, algorithm = of_kind(levers, Kind.SYSTEM), of_kind(levers, Kind.ALGORITHM)
    singles = _replayed(before, _fitting(system))
    far = () if singles else tuple(more_gpus(plan, _FAR_FACTORS))
    singles = singles or _replayed(before, _likely(before, far))
    savers = [lever.change for lever in system if lever.saved_bytes > 0]
    pairs, triples = ((), ()) if singles else _together(before, [*savers, *far])
    closest = min(levers, key=lambda lever: lever.device_bytes, default=None)
    return Remedies(
        singles=singles,
        pairs=pairs,
        triples=triples,
        algorithms=_replayed(before, _fitting(algorithm)),
        closest=None if singles or pairs or triples else closest,
    )


def _together(
    before: Prediction, changes: Sequence[Change]
) -> tuple[tuple[Lever, ...], tuple[Lever, ...]]:
    """Return the pairs of changes that fit, the smallest first; where none does, the threes."""
    share = _segment_share(before)
    both = [pair for one, other in combinations(changes, 2) if (pair := one.beside(other))]
    levers = [lever for pair in both if (lever := _lever(before, pair, share))]
    pairs = _replayed(before, _fitting(levers))
    if pairs:
        return pairs, ()
    threes = {
        frozenset({*lever.change.words.split(" and "), change.words}): three
        for lever in _closest_on_each(levers)
        for change in changes
        if (three := lever.change.beside(change))
    }
    return (), _replayed(before, _likely(before, threes.values()))


def _closest_on_each(levers: Sequence[Lever]) -> list[Lever]:
    """Return the few levers on each number of GPUs that need the least memory."""
    by_need = sorted(levers, key=lambda lever: (lever.gpu_ratio, lever.device_bytes))
    groups = groupby(by_need, key=lambda lever: lever.gpu_ratio)
    return [lever for _, group in groups for lever in islice(group, _EXTENDED)]


def _size(lever: Lever) -> tuple[Any, ...]:
    """How large a change is: more GPUs, what else changes, time per token, bytes."""
    return (
        max(1.0, lever.gpu_ratio),
        bool(lever.change.caution),
        round(lever.cost_ratio, 4),
        -lever.device_bytes,
    )


def _fitting(levers: Iterable[Lever]) -> list[Lever]:
    """Return the levers that fit, the smallest first."""
    return sorted((lever for lever in levers if lever.state is State.FITS), key=_size)


def _likely(before: Prediction, changes: Iterable[Change]) -> list[Lever]:
    """Return the changes that fit by the formulas, with the plan's share of segments, smallest first."""
    share = _segment_share(before)
    return _fitting(lever for change in changes if (lever := _lever(before, change, share)))


def _segment_share(before: Prediction) -> float:
    return float(before.memory["reserved_bytes"] / before.memory["allocated_bytes"] - 1)


def _replayed(before: Prediction, levers: Sequence[Lever]) -> tuple[Lever, ...]:
    """Return the first levers that fit when their allocator is replayed."""
    found: list[Lever] = []
    for lever in levers[:MOST_REPLAYED]:
        replayed = _lever(before, lever.change)
        if replayed is not None and replayed.state is State.FITS:
            found.append(replayed)
        if len(found) == MOST_SHOWN:
            break
    return tuple(found)
