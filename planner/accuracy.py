"""How far predictions are from measurements: today's planner against every recorded row.

Error in percent: 100 x (predicted - measured) / measured. Rows whose role is calibration are
listed and never counted; an out-of-memory row counts for the verdict only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from planner.as_run import alone, as_run
from planner.comparison import (
    MEMORY_QUANTITIES,
    TIME_QUANTITIES,
    Comparison,
    compare,
    compare_alone,
    groups_of,
)
from planner.errors import PlanError
from planner.plan import parse_plan
from planner.predict import predict
from planner.records import Kind, RecordedRow, Role
from planner.serving.runs import compare_served, served_traits
from planner.speed.calibrated import rows_used
from planner.units import format_signed
from planner.verdict import State
from planner.workload import TrainingWorkload

SCHEMA = 1
DONE = "done"
OUT_OF_MEMORY = "oom_device"
FAR_OFF_PERCENT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One comparison of one recorded row, with the groups that the row belongs to."""

    row_id: str
    role: Role
    comparison: Comparison
    groups: Mapping[str, str] = field(hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "row_id": self.row_id,
            "role": self.role.value,
            **asdict(self.comparison),
            "error_percent": self.comparison.error_percent,
            "groups": dict(self.groups),
        }


@dataclass(frozen=True, slots=True)
class Judged:
    """Today's verdict on one recorded row, and how the row ended."""

    row_id: str
    role: Role
    state: State
    outcome: str
    groups: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Errors of one quantity over some rows, in percent; `worst` keeps its sign."""

    n: int
    mean_percent: float
    mean_absolute_percent: float
    p90_percent: float
    worst_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """What `peakmark accuracy` prints; the held-out rows are among those of evidence.

    `judged` holds today's verdict on each row beside how it ended. `not_predicted` gives the reason
    for each training row that today's planner refuses. `served` holds the comparisons of decode and
    serve rows, whose quantities are their own; the rows are among the other ones.
    """

    evidence_rows: int
    holdout_rows: int
    calibration_rows: int
    other_rows: int
    judged: tuple[Judged, ...]
    not_predicted: Mapping[str, str] = field(hash=False)
    residuals: tuple[Residual, ...]
    served: tuple[Residual, ...] = ()

    @property
    def false_fits(self) -> tuple[str, ...]:
        """Ids of rows that ran out of memory though the planner says they fit."""
        return self._rows_judged(State.FITS, OUT_OF_MEMORY)

    @property
    def false_does_not_fit(self) -> tuple[str, ...]:
        """Ids of rows that ran though the planner says they do not fit."""
        return self._rows_judged(State.DOES_NOT_FIT, DONE)

    def _rows_judged(self, state: State, outcome: str) -> tuple[str, ...]:
        return tuple(j.row_id for j in self.judged if (j.state, j.outcome) == (state, outcome))

    def confusion(self) -> dict[str, dict[str, int]]:
        """Return how many rows of each verdict ran and how many ran out of memory."""
        return {
            state.value: {
                outcome: len(self._rows_judged(state, outcome)) for outcome in (DONE, OUT_OF_MEMORY)
            }
            for state in State
        }

    def far_off(self) -> list[Residual]:
        """Return the comparisons of bytes that are off by more than FAR_OFF_PERCENT."""
        return [
            r
            for r in self.counted()
            if r.comparison.quantity in MEMORY_QUANTITIES
            and abs(r.comparison.error_percent) > FAR_OFF_PERCENT
        ]

    def overall(self) -> dict[str, Statistics]:
        """Return the statistics of each quantity over all rows but those of calibration."""
        return _by_quantity(self.counted())

    def holdout(self) -> dict[str, Statistics]:
        """Return the statistics of each quantity over the rows that nothing was tuned on."""
        return _by_quantity(r for r in self.residuals if r.role is Role.HOLDOUT)

    def served_overall(self) -> dict[str, Statistics]:
        """Return the statistics of each quantity over decode and serve rows but those of calibration."""
        return _by_quantity(r for r in self.served if r.role is not Role.CALIBRATION)

    def by_group(self) -> dict[str, dict[str, dict[str, Statistics]]]:
        """Return the statistics by group ("engine"), value ("fsdp2") and quantity."""
        names = {name: None for residual in self.counted() for name in residual.groups}
        return {
            name: {value: found for (value,), found in self.crossed(name).items()} for name in names
        }

    def crossed(self, *names: str) -> dict[tuple[str, ...], dict[str, Statistics]]:
        """Return the statistics by the values of several groups together, numbers in order."""
        parted: dict[tuple[str, ...], list[Residual]] = defaultdict(list)
        for residual in self.counted():
            parted[tuple(residual.groups[name] for name in names)].append(residual)
        ordered = sorted(parted, key=lambda values: [_natural(value) for value in values])
        return {values: _by_quantity(parted[values]) for values in ordered}

    def counted(self) -> list[Residual]:
        """Return the comparisons of the rows that no constant was fitted to."""
        return [r for r in self.residuals if r.role is not Role.CALIBRATION]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema version."""
        return {
            "schema": SCHEMA,
            "rows": {
                "evidence": self.evidence_rows,
                "holdout": self.holdout_rows,
                "calibration": self.calibration_rows,
                "other": self.other_rows,
                "not_predicted": dict(self.not_predicted),
            },
            "quantities": _plain(self.overall()),
            "holdout_quantities": _plain(self.holdout()),
            "verdicts": self.confusion(),
            "false_fits": list(self.false_fits),
            "false_does_not_fit": list(self.false_does_not_fit),
            "groups": {
                name: {value: _plain(found) for value, found in values.items()}
                for name, values in self.by_group().items()
            },
            "residuals": [residual.to_dict() for residual in self.residuals],
            "serving": {
                "quantities": _plain(self.served_overall()),
                "residuals": [residual.to_dict() for residual in self.served],
            },
        }


def _natural(value: str) -> tuple[int, int, str]:
    """Sort numbers by size and before words."""
    return (0, int(value), "") if value.isdigit() else (1, 0, value)


def _plain(statistics: Mapping[str, Statistics]) -> dict[str, dict[str, Any]]:
    return {quantity: asdict(found) for quantity, found in statistics.items()}


def _by_quantity(residuals: Iterable[Residual]) -> dict[str, Statistics]:
    errors: dict[str, list[float]] = defaultdict(list)
    for residual in residuals:
        errors[residual.comparison.quantity].append(residual.comparison.error_percent)
    return {quantity: summarize(values) for quantity, values in errors.items()}


def summarize(errors_percent: Iterable[float]) -> Statistics:
    """Return n, signed mean, mean absolute, 90th percentile of the absolute, and worst error.

    The percentile interpolates linearly between the two nearest ranks.
    """
    errors = np.fromiter(errors_percent, dtype=np.float64)
    absolute = np.abs(errors)
    return Statistics(
        n=errors.size,
        mean_percent=float(errors.mean()),
        mean_absolute_percent=float(absolute.mean()),
        p90_percent=float(np.percentile(absolute, 90)),
        worst_percent=float(errors[absolute.argmax()]),
    )


@dataclass(slots=True)
class _Tally:
    """What has been counted so far."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    judged: list[Judged] = field(default_factory=list)
    not_predicted: dict[str, str] = field(default_factory=dict)
    residuals: list[Residual] = field(default_factory=list)
    served: list[Residual] = field(default_factory=list)

    def add(self, row: RecordedRow) -> None:
        """Predict for one row and count it."""
        if row.kind is not Kind.TRAIN_STEP or row.outcome not in (DONE, OUT_OF_MEMORY):
            self.counts["other"] += 1
            self._add_served(row)
            return
        try:
            plan = as_run(parse_plan(row.spec["plan"]), row.environment)
            plan = alone(plan) if row.spec.get("world") == "solo" else plan
            prediction = predict(plan).to_dict()
        except PlanError as error:
            self.not_predicted[row.id] = str(error)
            return
        workload = plan.workload
        if not isinstance(workload, TrainingWorkload):
            self.counts["other"] += 1
            return
        self.counts[row.role.value] += 1
        world = str(row.spec.get("world"))
        groups = groups_of(plan, workload, row, prediction["memory"]["device_bytes"])
        if row.role is not Role.CALIBRATION and world != "cpu":
            state = State(prediction["verdict"]["state"])
            self.judged.append(Judged(row.id, row.role, state, row.outcome, groups))
        if row.outcome == DONE:
            found = compare(prediction, row.measured, world)
            if world == "solo":
                found += compare_alone(plan, row.measured)
            self.residuals += [
                Residual(row_id=row.id, role=row.role, comparison=one, groups=groups)
                for one in found
                if not (one.quantity in TIME_QUANTITIES and row.id in rows_used())
            ]

    def _add_served(self, row: RecordedRow) -> None:
        if row.kind in (Kind.DECODE, Kind.SERVE) and row.outcome == DONE:
            groups = served_traits(row)
            self.served += [
                Residual(row_id=row.id, role=row.role, comparison=one, groups=groups)
                for one in compare_served(row)
            ]


def accuracy_report(rows: Iterable[RecordedRow]) -> AccuracyReport:
    """Predict today for every row and compare with what it measured."""
    tally = _Tally()
    for row in rows:
        tally.add(row)
    return AccuracyReport(
        evidence_rows=tally.counts["evidence"] + tally.counts["holdout"],
        holdout_rows=tally.counts["holdout"],
        calibration_rows=tally.counts["calibration"],
        other_rows=tally.counts["other"],
        judged=tuple(tally.judged),
        not_predicted=tally.not_predicted,
        residuals=tuple(tally.residuals),
        served=tuple(tally.served),
    )


def merged_reports(reports: Iterable[AccuracyReport]) -> AccuracyReport:
    """Return the report over the rows of all `reports` together, in their order."""
    parts = list(reports)
    return AccuracyReport(
        evidence_rows=sum(part.evidence_rows for part in parts),
        holdout_rows=sum(part.holdout_rows for part in parts),
        calibration_rows=sum(part.calibration_rows for part in parts),
        other_rows=sum(part.other_rows for part in parts),
        judged=tuple(judged for part in parts for judged in part.judged),
        not_predicted={row: why for part in parts for row, why in part.not_predicted.items()},
        residuals=tuple(residual for part in parts for residual in part.residuals),
        served=tuple(residual for part in parts for residual in part.served),
    )


def device_ratios(report: AccuracyReport) -> list[tuple[Mapping[str, str], float]]:
    """Return traits and measured / predicted of every row that no constant was fitted to.

    A row counts by its device bytes, by its reserved bytes where it has no device bytes.
    """
    by_row: dict[str, Residual] = {}
    for residual in report.counted():
        if residual.comparison.quantity in ("reserved", "device"):
            # Device bytes come after reserved bytes and take their place.
            by_row[residual.row_id] = residual
    return [
        (found.groups, found.comparison.measured / found.comparison.predicted)
        for found in by_row.values()
    ]


def breaches(report: AccuracyReport, bounds: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each bound of recorded/bounds.json that the report breaks."""
    found = _quantity_breaches(report.overall(), bounds["quantities"], "")
    if report.holdout_rows:
        held = bounds.get("holdout", {}).get("quantities", {})
        found += _quantity_breaches(report.holdout(), held, "holdout ")
    for name in ("false_fits", "false_does_not_fit"):
        if len(getattr(report, name)) > bounds[name]:
            found.append(f"{name}: {', '.join(getattr(report, name))}")
    if report.not_predicted:
        found.append(f"not predicted: {', '.join(report.not_predicted)}")
    return found


def _quantity_breaches(
    seen: Mapping[str, Statistics], bounds: Mapping[str, Mapping[str, float]], prefix: str
) -> list[str]:
    found = []
    for quantity, limits in bounds.items():
        statistics = seen.get(quantity)
        if statistics is None:
            found.append(f"there is no evidence for {prefix}{quantity}")
            continue
        for name, limit in limits.items():
            value = abs(getattr(statistics, name))
            if value > limit:
                found.append(f"{prefix}{quantity} {name} is {value:.2f}: the bound is {limit}")
    return found


def unexplained(report: AccuracyReport, explanations: Mapping[str, str]) -> list[str]:
    """Return one sentence for each row far off that recorded/explanations.json says nothing of."""
    return [
        f"{residual.row_id}: {residual.comparison.quantity} is off by "
        f"{format_signed(residual.comparison.error_percent, 1)} and not explained"
        for residual in report.far_off()
        if not explanations.get(residual.row_id, "").strip()
    ]
