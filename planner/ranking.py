"""Is the alternative that is predicted to be fastest the fastest that was measured?

A group holds recorded steps of one model, workload and number of ranks on one kind of GPU that differ
in how they are run. Of a group the prediction chooses one; its regret is how much longer the chosen
one took than the fastest, as measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, log, sqrt
from statistics import median
from typing import Any

import numpy as np

from planner.accuracy import Residual, accuracy_report
from planner.as_run import as_run
from planner.checks import canonical_json
from planner.comparison import ALONE, Comparison, gpu_name
from planner.plan import Plan, parse_plan
from planner.records import RecordedRow, Role
from planner.units import format_share
from planner.workload import Parallelism, TrainingWorkload, field_words, flat_dict

# A choice within this share of the fastest is a good one.
GOOD_PERCENT = 3.0
# In so many of the groups the choice is to be a good one.
AIM_SHARE = 0.95
_TWO_SIDED_95 = 1.96
# Draws of what repeats could have shown: a share of groups is told to a hundredth.
_DRAWS, _SEED = 4000, 0
# How a step is run; all else is what it computes.
ALTERNATIVES = (
    *("engine", "zero_stage", "attention", "checkpointing", "checkpoint_every", "loss"),
    *("offload_optimizer", "expandable_segments", "reduce_dtype", "sync_each_micro_batch"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One alternative of a group: its choices in words, its step time predicted and, over runs, measured."""

    words: str
    predicted_s: float
    measured_s: float
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup:
    """Alternatives of one model and workload; `quantity` is "step_time", or that of a rank alone.

    `spread` is the standard deviation of ln(time) between runs of one plan of this model and workload,
    and its degrees of freedom; None where nothing was run twice.
    """

    title: str
    quantity: str
    alternatives: tuple[Timed, ...]
    spread: tuple[float, int] | None = None

    @property
    def chosen(self) -> Timed:
        """The alternative that is predicted to be fastest."""
        return min(self.alternatives, key=lambda one: one.predicted_s)

    @property
    def fastest(self) -> Timed:
        """The alternative that was fastest."""
        return min(self.alternatives, key=lambda one: one.measured_s)

    @property
    def regret_percent(self) -> float:
        """How much longer the chosen one took than the fastest."""
        return 100 * (self.chosen.measured_s / self.fastest.measured_s - 1)

    @property
    def told_apart_percent(self) -> float | None:
        """By how much chosen and fastest must differ to be told apart; None without repeats.

        1.96 standard errors of the difference of two means of as many runs, of a normal ln(time).
        """
        if self.spread is None:
            return None
        error = self.spread[0] * sqrt(1 / self.chosen.runs + 1 / self.fastest.runs)
        return 100 * (exp(_TWO_SIDED_95 * error) - 1)

    @property
    def is_good(self) -> bool:
        """Whether the chosen one is within `GOOD_PERCENT` of the fastest."""
        return self.regret_percent <= GOOD_PERCENT

    @property
    def is_lost(self) -> bool:
        """Whether the chosen one is slower than a good one, and by more than repeats of one plan differ."""
        return not self.is_good and self.regret_percent > (self.told_apart_percent or 0.0)

    @property
    def exact_share(self) -> float:
        """How often runs like these would call the choice good, were every prediction exact.

        Each alternative is drawn as its predicted time with the spread of as many runs as it has; the
        fastest of many is one that had luck, which an exact prediction has not. 1 without repeats.
        """
        if self.spread is None:
            return 1.0
        runs = np.array([one.runs for one in self.alternatives])
        predicted_s = np.array([one.predicted_s for one in self.alternatives])
        noise = np.random.default_rng(_SEED).standard_normal((_DRAWS, runs.size))
        drawn_s = predicted_s * np.exp(self.spread[0] / np.sqrt(runs) * noise)
        limits_s = (1 + GOOD_PERCENT / 100) * drawn_s.min(axis=1)
        return float(np.mean(drawn_s[:, predicted_s.argmin()] <= limits_s))

    @property
    def good_share(self) -> float:
        """The share of alternatives that are good choices: what choosing blindly would reach."""
        limit = (1 + GOOD_PERCENT / 100) * self.fastest.measured_s
        return sum(one.measured_s <= limit for one in self.alternatives) / len(self.alternatives)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "title": self.title,
            "quantity": self.quantity,
            "alternatives": len(self.alternatives),
            "chosen": self.chosen.words,
            "fastest": self.fastest.words,
            "regret_percent": self.regret_percent,
            "told_apart_percent": self.told_apart_percent,
        }

    def pairs(self) -> tuple[int, int]:
        """Return how many pairs differ by more than `GOOD_PERCENT`, and how many are ordered right."""
        apart = right = 0
        for one, other in combinations(self.alternatives, 2):
            slow, quick = sorted((one, other), key=lambda timed: -timed.measured_s)
            if slow.measured_s > (1 + GOOD_PERCENT / 100) * quick.measured_s:
                apart += 1
                right += slow.predicted_s > quick.predicted_s
        return apart, right


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingReport:
    """Every group of at least two alternatives, the largest regret first."""

    groups: tuple[RankedGroup, ...] = field(repr=False)

    @property
    def good(self) -> int:
        """Groups whose chosen alternative is within `GOOD_PERCENT` of the fastest."""
        return sum(group.is_good for group in self.groups)

    @property
    def not_lost(self) -> int:
        """Groups whose chosen alternative is good, or cannot be told from the fastest by the runs there are."""
        return sum(not group.is_lost for group in self.groups)

    @property
    def blind(self) -> float:
        """Groups in which a blind choice would be good, on average."""
        return sum(group.good_share for group in self.groups)

    @property
    def exact(self) -> float:
        """Groups in which runs like these would call the choice good, were every prediction exact."""
        return sum(group.exact_share for group in self.groups)

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs that differ noticeably in any group, and those of them that are ordered right."""
        found = [group.pairs() for group in self.groups]
        return sum(apart for apart, _ in found), sum(right for _, right in found)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the counts, and of every group what was chosen and what that lost."""
        apart, right = self.pairs
        return {
            "groups": len(self.groups),
            "good": self.good,
            "not_lost": self.not_lost,
            "blind": self.blind,
            "exact": self.exact,
            "pairs": apart,
            "pairs_right": right,
            "each": [group.to_dict() for group in self.groups],
        }

    def sentence(self) -> str:
        """Return the figures in words."""
        if not self.groups:
            return "No recorded step has an alternative."
        number = len(self.groups)
        apart, right = self.pairs
        worst = self.groups[0].regret_percent
        return (
            f"In {self.good} of {number} groups ({format_share(self.good / number, 0)}) the alternative "
            f"predicted to be fastest is within {GOOD_PERCENT:.0f} % of the fastest measured (a blind choice: "
            f"{format_share(self.blind / number, 0)}); at worst it is {worst:.1f} % slower. Of {apart:,} "
            f"pairs that differ by more, {right:,} ({format_share(right / max(1, apart), 0)}) are ordered right."
        )

    def repeats_sentence(self) -> str:
        """Return how many groups are lost when what repeats cannot tell apart is no loss, in words."""
        number = max(1, len(self.groups))
        return (
            f"Where a choice is slower than that by no more than repeats of one plan differ, the runs do not "
            f"say which is faster; counted as no loss, it is {self.not_lost} of {len(self.groups)} groups "
            f"({format_share(self.not_lost / number, 0)}). Were every prediction exact, runs that spread like "
            f"these would call {self.exact:.1f} groups ({format_share(self.exact / number, 0)}) good."
        )


def ranking_report(
    rows: Iterable[RecordedRow], residuals: Iterable[Residual] | None = None
) -> RankingReport:
    """Group recorded steps by what they compute and rank the alternatives of each group.

    `residuals` are those of an accuracy report over the rows, made anew if left out; what they hold no
    time of is left out (another world, a constant's row), and so are rows of calibration. An alternative
    measured several times counts with its median.
    """
    known = list(rows)
    told = accuracy_report(known).residuals if residuals is None else residuals
    timed = {one.row_id: one for one in told if _is_time(one)}
    groups: dict[tuple[str, str], dict[str, list[Comparison]]] = defaultdict(
        lambda: defaultdict(list)
    )
    titles: dict[tuple[str, str], tuple[str, str]] = {}
    for row in known:
        if row.id in timed:
            comparison = timed[row.id].comparison
            plan = as_run(parse_plan(row.spec["plan"]), row.environment)
            work, words = _work_of(plan)
            key = (canonical_json("work", [work, _place(row)]), comparison.quantity)
            # Plans that differ in their ranks alone are one when it comes to how far repeats spread.
            at_any_ranks = canonical_json("work", [{**work, "world_size": None}, _place(row)])
            titles[key] = (_title(plan), at_any_ranks)
            groups[key][words].append(comparison)
    spreads = _spreads((titles[key][1], times) for key, times in groups.items())
    ranked = [
        RankedGroup(
            title=titles[key][0],
            quantity=key[1],
            alternatives=_medians(alternatives),
            spread=spreads.get(titles[key][1]),
        )
        for key, alternatives in groups.items()
        if len(alternatives) > 1
    ]
    return RankingReport(groups=tuple(sorted(ranked, key=lambda group: -group.regret_percent)))


def _is_time(one: Residual) -> bool:
    return one.role is not Role.CALIBRATION and one.comparison.quantity in ("step_time", ALONE)


def _spreads(
    found: Iterable[tuple[str, Mapping[str, Sequence[Comparison]]]],
) -> dict[str, tuple[float, int]]:
    """Return the standard deviation of ln(time) between runs of one alternative, and its degrees of freedom.

    Pooled over the alternatives of a model and workload at all numbers of ranks: squares about each
    one's mean over the runs more than one. What was never repeated is not in it.
    """
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for work, alternatives in found:
        for times in alternatives.values():
            logs = [log(one.measured) for one in times]
            mean = sum(logs) / len(logs)
            squares[work][0] += sum((one - mean) ** 2 for one in logs)
            squares[work][1] += len(logs) - 1
    return {
        work: (sqrt(total / freedom), int(freedom))
        for work, (total, freedom) in squares.items()
        if freedom
    }


def _work_of(plan: Plan) -> tuple[dict[str, Any], str]:
    """Return what a plan computes, and how it is run in words."""
    every = {**flat_dict(plan.workload), **flat_dict(plan.parallelism)}
    default = {**flat_dict(TrainingWorkload()), **flat_dict(Parallelism())}
    words = [
        f"{field_words(name)} {every[name]}"
        for name in ALTERNATIVES
        if name in ("engine", "zero_stage") or every[name] != default[name]
    ]
    work = {name: value for name, value in every.items() if name not in ALTERNATIVES}
    return {**work, "model": dict(plan.model_source)}, ", ".join(words)


def _place(row: RecordedRow) -> list[Any]:
    """Return where a row was measured: times of different machines are no alternatives."""
    versions: Mapping[str, Any] = row.environment.get("versions") or {}
    return [gpu_name(row.environment), versions.get("torch"), versions.get("transformers")]


def _title(plan: Plan) -> str:
    workload = plan.workload
    assert isinstance(workload, TrainingWorkload)
    name = plan.model.name.rsplit("/", 1)[-1]
    rounds = f" x {workload.grad_accumulation}" if workload.grad_accumulation > 1 else ""
    return (
        f"{name}, {workload.micro_batch}{rounds} x {workload.sequence_length:,} tokens, "
        f"{workload.precision}, {plan.parallelism.world_size} ranks"
    )


def _medians(alternatives: Mapping[str, Sequence[Comparison]]) -> tuple[Timed, ...]:
    return tuple(
        Timed(
            words=words,
            predicted_s=median(one.predicted for one in times),
            measured_s=median(one.measured for one in times),
            runs=len(times),
        )
        for words, times in alternatives.items()
    )
