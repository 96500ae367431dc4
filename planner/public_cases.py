"""What others measured: public reports of training runs, as plans beside what was seen.

The file (recorded/public/training.json) holds `cases`, `not_planned` (report -> why a plan cannot
say it, though the report is complete) and `left_out` (reason -> ids of reports). A case names its
source, a plan, the counter that was read and either the bytes seen (one number, or [low, high]) or
the outcome, and in `note` what the report leaves open. Several cases may come from one report.
`differences` are what the reported run did otherwise than any plan can say, worked out in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.plan import parse_plan
from planner.predict import predict
from planner.units import format_bytes, format_signed

COUNTERS = ("allocated", "reserved", "device", "outcome")
OUTCOMES = ("ran", "out of memory")
# A case that is off by more than this needs an explanation.
FAR_OFF_PERCENT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a reported run held more, or less, than the plan: the product of `factors` in bytes."""

    what: str
    factors: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes to add to the prediction; negative for what the run did without."""
        return prod(self.factors)

    @property
    def text(self) -> str:
        """The bytes, signed, and what they are, for a table."""
        sign = "-" if self.size_bytes < 0 else "+"
        return f"{sign}{format_bytes(abs(self.size_bytes))}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicCase:
    """One published measurement: bytes between `low_bytes` and `high_bytes`, or an outcome."""

    id: str
    report: str
    source: str
    label: str
    plan: Mapping[str, Any] = field(hash=False)
    counter: str
    low_bytes: int | None
    high_bytes: int | None
    outcome: str | None
    note: str
    differences: tuple[Difference, ...] = ()

    @property
    def measured_text(self) -> str:
        """What was seen, for a table."""
        if self.low_bytes is None or self.high_bytes is None:
            return str(self.outcome)
        low = format_bytes(self.low_bytes)
        same = self.low_bytes == self.high_bytes
        return low if same else f"{low} to {format_bytes(self.high_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Today's prediction for a case: bytes of its counter and verdict, or why there is none."""

    case: PublicCase
    predicted_bytes: int | None
    state: str | None
    refusal: str | None

    @property
    def error_percent(self) -> float | None:
        """Signed error against the nearest published value; 0 inside a published range."""
        return self._error_percent(0)

    @property
    def explained_percent(self) -> float | None:
        """The error that is left once the case's differences are counted."""
        return self._error_percent(sum(d.size_bytes for d in self.case.differences))

    @property
    def is_far_off(self) -> bool:
        """Whether the prediction misses the report by more than 10 %, or its outcome."""
        error = self.error_percent
        return self.error_text == "wrong" if error is None else abs(error) > FAR_OFF_PERCENT

    def _error_percent(self, more_bytes: int) -> float | None:
        low, high = self.case.low_bytes, self.case.high_bytes
        if self.predicted_bytes is None or low is None or high is None:
            return None
        predicted_bytes = self.predicted_bytes + more_bytes
        nearest = min(max(predicted_bytes, low), high)
        return 100 * (predicted_bytes - nearest) / nearest

    @property
    def predicted_text(self) -> str:
        """What is predicted, for a table."""
        if self.predicted_bytes is None or self.state is None:
            return "-"
        size = format_bytes(self.predicted_bytes)
        return f"{self.state.replace('_', ' ')}, {size}" if self.case.outcome else size

    @property
    def error_text(self) -> str:
        """The error, or whether the verdict is right, for a table."""
        if self.state is None:
            return "-"
        if self.case.outcome is None:
            return format_signed(self.error_percent, 1)
        if self.state == "tight":
            return "open"
        is_right = (self.state == "does_not_fit") == (self.case.outcome == "out of memory")
        return "right" if is_right else "wrong"


@dataclass(frozen=True, slots=True)
class PublicCases:
    """The cases of a file, and the reports that no case was made of, with the reasons."""

    cases: tuple[PublicCase, ...]
    not_planned: Mapping[str, str] = field(hash=False)
    left_out: Mapping[str, tuple[str, ...]] = field(hash=False)

    @property
    def num_reports(self) -> int:
        """How many reports gave at least one case."""
        return len({case.report for case in self.cases})

    def answers(self) -> Iterator[Answer]:
        """Predict for each case."""
        return (answer(case) for case in self.cases)


@lru_cache(maxsize=256)
def answer(case: PublicCase) -> Answer:
    """Predict for one case; a plan that is refused gives the reason instead."""
    try:
        prediction = predict(parse_plan(case.plan)).to_dict()
    except PlanError as error:
        return Answer(case=case, predicted_bytes=None, state=None, refusal=str(error))
    counter = "device" if case.counter == "outcome" else case.counter
    return Answer(
        case=case,
        predicted_bytes=prediction["memory"][f"{counter}_bytes"],
        state=prediction["verdict"]["state"],
        refusal=None,
    )


def read_cases(path: Path) -> PublicCases:
    """Read a file of public cases; raises ValueError naming a case without a measurement."""
    data = json.loads(path.read_text())
    cases = tuple(_case(row) for row in data["cases"])
    return PublicCases(
        cases=cases,
        not_planned=data["not_planned"],
        left_out={reason: tuple(ids) for reason, ids in data["left_out"].items()},
    )


def _case(row: Mapping[str, Any]) -> PublicCase:
    low, high = row.get("bytes", (None, None))
    is_outcome = row["counter"] == "outcome"
    if row["counter"] not in COUNTERS or is_outcome != (row.get("outcome") in OUTCOMES):
        raise ValueError(f"public case {row['id']}: counter and measurement do not belong together")
    if not is_outcome and not (low and high and low <= high):
        raise ValueError(f"public case {row['id']}: bytes must be [low, high]")
    return PublicCase(
        id=row["id"],
        report=row["report"],
        source=row["source"],
        label=row["label"],
        plan=row["plan"],
        counter=row["counter"],
        low_bytes=low,
        high_bytes=high,
        outcome=row.get("outcome"),
        note=row["note"],
        differences=tuple(
            Difference(what=found["what"], factors=tuple(found["factors"]))
            for found in row.get("differences", ())
        ),
    )
