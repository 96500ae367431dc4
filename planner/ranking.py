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
from statistics import median
from typing import Any

from planner.accuracy import DONE
from planner.as_run import as_run
from planner.checks import canonical_json
from planner.comparison import ALONE, compare_alone, gpu_name
from planner.errors import PlanError
from planner.plan import Plan, parse_plan
from planner.records import Kind, RecordedRow, Role
from planner.speed.calibrated import rows_used
from planner.throughput import training_throughput
from planner.workload import Parallelism, TrainingWorkload, flat_dict

# A choice within this share of the fastest is a good one.
GOOD_PERCENT = 3.0
# How a step is run; all else is what it computes.
ALTERNATIVES = (
    *("engine", "zero_stage", "attention", "checkpointing", "checkpoint_every", "loss"),
    *("offload_optimizer", "expandable_segments", "reduce_dtype", "sync_each_micro_batch"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One alternative of a group: its choices in words, and its step time predicted and measured."""

    words: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup:
    """Alternatives of one model and workload; `quantity` is "step_time", or that of a rank alone."""

    title: str
    quantity: str
    alternatives: tuple[Timed, ...]

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
    def good_share(self) -> float:
        """The share of alternatives that are good choices: what choosing blindly would reach."""
        limit = (1 + GOOD_PERCENT / 100) * self.fastest.measured_s
        return sum(one.measured_s <= limit for one in self.alternatives) / len(self.alternatives)

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
        return sum(group.regret_percent <= GOOD_PERCENT for group in self.groups)

    @property
    def blind(self) -> float:
        """Groups in which a blind choice would be good, on average."""
        return sum(group.good_share for group in self.groups)

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs that differ noticeably in any group, and those of them that are ordered right."""
        found = [group.pairs() for group in self.groups]
        return sum(apart for apart, _ in found), sum(right for _, right in found)

    def sentence(self) -> str:
        """Return the figures in words."""
        if not self.groups:
            return "No recorded step has an alternative."
        number = len(self.groups)
        apart, right = self.pairs
        worst = self.groups[0].regret_percent
        return (
            f"In {self.good} of {number} groups ({self.good / number:.0%}) the alternative predicted "
            f"to be fastest is within {GOOD_PERCENT:.0f} % of the fastest measured (a blind choice: "
            f"{self.blind / number:.0%}); at worst it is {worst:.1f} % slower. Of {apart:,} pairs that "
            f"differ by more, {right:,} ({right / max(1, apart):.0%}) are ordered right."
        )


def ranking_report(rows: Iterable[RecordedRow]) -> RankingReport:
    """Group recorded steps by what they compute and rank the alternatives of each group.

    Rows of calibration and those whose time set a constant are left out, and so are worlds that are
    not honest for time. An alternative measured several times counts with its median.
    """
    groups: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    titles: dict[tuple[str, str], str] = {}
    for row in rows:
        found = _timed(row)
        if found is not None:
            quantity, plan, predicted_s, measured_s = found
            work, words = _work_of(plan)
            key = (canonical_json("work", [work, _place(row)]), quantity)
            titles[key] = _title(plan)
            groups[key][words].append((predicted_s, measured_s))
    ranked = [
        RankedGroup(title=titles[key], quantity=key[1], alternatives=_medians(alternatives))
        for key, alternatives in groups.items()
        if len(alternatives) > 1
    ]
    return RankingReport(groups=tuple(sorted(ranked, key=lambda group: -group.regret_percent)))


def _timed(row: RecordedRow) -> tuple[str, Plan, float, float] | None:
    """Return quantity, plan, predicted and measured step time; None for a row that tells none."""
    if (
        row.kind is not Kind.TRAIN_STEP
        or row.outcome != DONE
        or not row.measured.get("step_time_s")
    ):
        return None
    if row.role is Role.CALIBRATION or row.id in rows_used():
        return None
    try:
        plan = as_run(parse_plan(row.spec["plan"]), row.environment)
    except PlanError:
        return None
    world, measured_s = str(row.spec.get("world")), float(row.measured["step_time_s"])
    if not isinstance(plan.workload, TrainingWorkload):
        return None
    if world == "nccl" or (world == "solo" and plan.parallelism.world_size == 1):
        chosen = plan.model, plan.workload, plan.parallelism, plan.hardware
        return "step_time", plan, training_throughput(*chosen).step_time_s, measured_s
    alone = compare_alone(plan, row.measured) if world == "solo" else []
    return (ALONE, plan, alone[0].predicted, measured_s) if alone else None


def _work_of(plan: Plan) -> tuple[dict[str, Any], str]:
    """Return what a plan computes, and how it is run in words."""
    every = {**flat_dict(plan.workload), **flat_dict(plan.parallelism)}
    default = {**flat_dict(TrainingWorkload()), **flat_dict(Parallelism())}
    words = [
        f"{name.replace('_', ' ')} {every[name]}"
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


def _medians(alternatives: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[Timed, ...]:
    return tuple(
        Timed(
            words=words,
            predicted_s=median(predicted for predicted, _ in times),
            measured_s=median(measured for _, measured in times),
        )
        for words, times in alternatives.items()
    )
