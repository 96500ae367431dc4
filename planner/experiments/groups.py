"""Repeats of one spec, how far apart two of them are, and whether that can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import comb
from statistics import mean, median, stdev
from typing import Any

from planner.checks import canonical_json
from planner.experiments.lines import FIGURES, Line
from planner.experiments.variables import KINDS, MEASURED, MODEL_DIMENSIONS, Kind

# A separation that comes about by chance less often than this is taken as real.
LEVEL = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Lines of one and the same spec: repeats."""

    variables: Mapping[str, Any] = field(hash=False)
    lines: tuple[Line, ...]

    def values(self, figure: str) -> list[float]:
        """Return what the finished repeats measured of a figure."""
        return [
            line.figures[figure]
            for line in self.lines
            if line.outcome == "done" and figure in line.figures
        ]

    def spread(self, figure: str) -> Spread | None:
        """Return count, median and spread of a figure; None where no repeat measured it."""
        values = self.values(figure)
        return spread_of(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How repeats lie: `variation` is the sample's standard deviation over its mean, None for one."""

    count: int
    median: float
    low: float
    high: float
    variation: float | None


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    middle = mean(values)
    varied = len(values) > 1 and middle
    return Spread(
        count=len(values),
        median=median(values),
        low=min(values),
        high=max(values),
        variation=stdev(values) / abs(middle) if varied else None,
    )


def group_lines(lines: Sequence[Line]) -> list[Group]:
    """Return lines by spec, in the order in which each first comes."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(canonical_json("variables", dict(line.variables)), []).append(line)
    return [Group(variables=own[0].variables, lines=tuple(own)) for own in found.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A variable that two groups have different values of."""

    column: str
    before: Any
    after: Any

    def words(self) -> str:
        """Return the change as text, such as "precision: mixed → bf16"."""
        return f"{self.column}: {_shown(self.before)} → {_shown(self.after)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).replace("_", " ")


def changes(baseline: Group, other: Group) -> dict[Kind, list[Change]]:
    """Return what differs by kind of variable.

    A column that one of the two does not have, such as the page size of a cache without pages, is
    no variable of both and does not count; nor do the dimensions of another model beside its name.
    """
    found: dict[Kind, list[Change]] = {kind: [] for kind in Kind}
    other_model = baseline.variables.get("model") != other.variables.get("model")
    for column, before in baseline.variables.items():
        after = other.variables.get(column)
        goes_without_saying = other_model and column in MODEL_DIMENSIONS
        if after is not None and after != before and not goes_without_saying:
            change = Change(column=column, before=before, after=after)
            found[KINDS[column]].append(change)
    return found


def flags(baseline: Group, other: Group) -> list[str]:
    """Return what forbids to put a difference down to one variable, in sentences."""
    found = changes(baseline, other)
    algorithm, system, work = (found[kind] for kind in Kind)
    sentences = []
    if algorithm and system:
        sentences.append(
            f"changes both the algorithm ({_listed(algorithm)}) and the system ({_listed(system)}): "
            "no difference can be put down to either. Change one at a time."
        )
    measured = [change for change in work if change.column in MEASURED]
    work = [change for change in work if change.column not in MEASURED]
    if measured:
        sentences.append(f"was measured otherwise ({_listed(measured)}).")
    if work:
        sentences.append(
            f"does other work ({_listed(work)}): figures of a whole step or request do not compare, "
            "rates such as tokens per second may."
        )
    return sentences


def _listed(found: Sequence[Change]) -> str:
    return ", ".join(change.words() for change in found)


class Answer(StrEnum):
    """Whether a difference is real, as far as repeats can tell."""

    REAL = "real"
    LIKELY = "likely, too few repeats"
    OVERLAP = "not told apart"
    EQUAL = "equal"
    UNTOLD = "cannot be told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer with its reason; `ratio` is the other median over the baseline's."""

    answer: Answer
    ratio: float | None
    sentence: str


def chance_of_separation(first: int, second: int) -> float:
    """Return how often two samples of one distribution lie wholly apart: 2 / C(n + m, n).

    Every order of n + m values is as likely; two of the C(n + m, n) ways to share them out put all of one
    sample on one side (the exact rank-sum test at its extreme; Wilcoxon 1945).
    """
    return 2 / comb(first + second, first)


def judge_difference(baseline: Group, other: Group, figure: str) -> Judgement:
    """Say whether the repeats of two groups differ in a figure: their ranges must lie apart.

    With one repeat on either side it cannot be told. Ranges apart are real where chance puts them
    apart in at most 5 % of cases, which takes 4 and 4 repeats, or 3 and 5.
    """
    before, after = baseline.values(figure), other.values(figure)
    if not before or not after:
        who = "the baseline" if not before else "this group"
        return Judgement(
            answer=Answer.UNTOLD, ratio=None, sentence=f"No finished run of {who} measured it."
        )
    ratio = median(after) / median(before) if median(before) else None
    counts = f"{len(after)} and {len(before)} {_runs(len(before))}"
    if min(len(before), len(after)) == 1:
        few = "Both were" if len(before) == len(after) else "One of them was"
        sentence = f"{few} run only once: how far repeats lie apart is not known. Run it again."
        return Judgement(answer=Answer.UNTOLD, ratio=ratio, sentence=sentence)
    if {*before} == {*after} and len({*before}) == 1:
        sentence = f"All of {counts} measured the same."
        return Judgement(answer=Answer.EQUAL, ratio=ratio, sentence=sentence)
    if max(before) >= min(after) and max(after) >= min(before):
        sentence = f"The ranges of {counts} overlap."
        return Judgement(answer=Answer.OVERLAP, ratio=ratio, sentence=sentence)
    return _apart(len(before), len(after), ratio, counts)


def _apart(before: int, after: int, ratio: float | None, counts: str) -> Judgement:
    chance = chance_of_separation(before, after)
    sentence = (
        f"The ranges of {counts} lie apart, which equal ones do in {100 * chance:.2g} % of cases."
    )
    if chance <= LEVEL:
        return Judgement(answer=Answer.REAL, ratio=ratio, sentence=sentence)
    more = f"{sentence} Repeat both until they are four each."
    return Judgement(answer=Answer.LIKELY, ratio=ratio, sentence=more)


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


def known_figures(lines: Sequence[Line]) -> list[str]:
    """Return the figures that any of the lines measured, in their order."""
    return [name for name in FIGURES if any(name in line.figures for line in lines)]
