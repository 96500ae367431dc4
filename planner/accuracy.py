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

from planner.errors import PlanError
from planner.memory.overheads import NCCL_OVERHEAD
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.records import Kind, RecordedRow, Role
from planner.workload import TrainingWorkload

SCHEMA = 1
MEMORY_QUANTITIES = ("allocated", "reserved", "device")
# The component of the prediction, and its name in a measurement.
STATE_FIELDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
}
DONE = "done"
OUT_OF_MEMORY = "oom_device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity predicted and measured, in bytes or seconds."""

    quantity: str
    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        """Signed error relative to the measurement."""
        return 100 * (self.predicted - self.measured) / self.measured


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

    `false_fits`: ids of rows that ran out of memory though the planner says they fit;
    `false_does_not_fit`: ids of rows that ran though it says they do not. `not_predicted` gives
    the reason for each training row that today's planner refuses.
    """

    evidence_rows: int
    holdout_rows: int
    calibration_rows: int
    other_rows: int
    false_fits: tuple[str, ...]
    false_does_not_fit: tuple[str, ...]
    not_predicted: Mapping[str, str] = field(hash=False)
    residuals: tuple[Residual, ...]

    def overall(self) -> dict[str, Statistics]:
        """Return the statistics of each quantity over all rows but those of calibration."""
        return _by_quantity(self.counted())

    def holdout(self) -> dict[str, Statistics]:
        """Return the statistics of each quantity over the rows that nothing was tuned on."""
        return _by_quantity(r for r in self.residuals if r.role is Role.HOLDOUT)

    def by_group(self) -> dict[str, dict[str, dict[str, Statistics]]]:
        """Return the statistics by group ("engine"), value ("fsdp2") and quantity."""
        parted: dict[str, dict[str, list[Residual]]] = defaultdict(lambda: defaultdict(list))
        for residual in self.counted():
            for name, value in residual.groups.items():
                parted[name][value].append(residual)
        return {
            name: {value: _by_quantity(found) for value, found in sorted(values.items())}
            for name, values in parted.items()
        }

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
            "false_fits": list(self.false_fits),
            "false_does_not_fit": list(self.false_does_not_fit),
            "groups": {
                name: {value: _plain(found) for value, found in values.items()}
                for name, values in self.by_group().items()
            },
            "residuals": [residual.to_dict() for residual in self.residuals],
        }


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


def compare(
    prediction: Mapping[str, Any], measured: Mapping[str, Any], world: str
) -> list[Comparison]:
    """Pair a prediction's dictionary with what a run measured, where the world is honest for it.

    On the CPU, where device counters are null, the bytes of the training state are compared.
    """
    pairs = _memory_pairs(prediction["memory"], measured, world)
    if world == "cpu":
        pairs = _state_pairs(prediction, measured)
    # A rank alone does not communicate: its step is a whole one only when the plan has one rank.
    alone = prediction["plan"]["parallelism"]["world_size"] == 1
    if world == "nccl" or (world == "solo" and alone):
        pairs.append(
            ("step_time", prediction["throughput"]["step_time_s"], measured.get("step_time_s"))
        )
    return [
        Comparison(quantity=name, predicted=float(ours), measured=float(seen))
        for name, ours, seen in pairs
        if ours is not None and seen
    ]


def _memory_pairs(
    memory: Mapping[str, Any], measured: Mapping[str, Any], world: str
) -> list[tuple[str, float | None, float | None]]:
    """Pair the counters of one rank; ranks that share a GPU see one another's device bytes."""
    predicted = {name: memory.get(f"{name}_bytes") for name in MEMORY_QUANTITIES}
    if world == "shared":
        predicted["device"] = None
    if world == "solo" and predicted["device"] is not None:
        # A rank alone has no communicator.
        predicted["device"] -= sum(
            row["bytes"] for row in memory.get("overheads", ()) if row["name"] == NCCL_OVERHEAD
        )
    return [(name, ours, measured.get(f"{name}_bytes")) for name, ours in predicted.items()]


def _state_pairs(
    prediction: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[tuple[str, float | None, float | None]]:
    """Pair the bytes of parameters, gradients and optimizer states as the optimizer step begins."""
    phases = {phase["name"]: phase["parts"] for phase in prediction["memory"]["phases"]}
    seen = measured.get("state") or {}
    return [
        (f"{component} state", phases["optimizer"].get(component), seen.get(name))
        for component, name in STATE_FIELDS.items()
    ]


def gpu_name(environment: Mapping[str, Any]) -> str:
    """Return the name of the GPU that a run had, "none" on the CPU."""
    gpu = environment.get("gpu")
    return str(gpu.get("name")) if isinstance(gpu, Mapping) else "none"


def groups_of(plan: Plan, workload: TrainingWorkload, row: RecordedRow) -> dict[str, str]:
    """Return what a row is grouped by: the choices of its plan, its world and its GPU."""
    parallelism = plan.parallelism
    return {
        "job": plan.job.value,
        "engine": parallelism.engine.value,
        "stage": str(parallelism.zero_stage),
        "world size": str(parallelism.world_size),
        "attention": workload.attention.value,
        "checkpointing": workload.checkpointing.value,
        "precision": workload.precision.value,
        "architecture": plan.model.family,
        "world": str(row.spec.get("world")),
        "gpu": gpu_name(row.environment),
    }


@dataclass(slots=True)
class _Tally:
    """What has been counted so far."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    false_fits: list[str] = field(default_factory=list)
    false_does_not_fit: list[str] = field(default_factory=list)
    not_predicted: dict[str, str] = field(default_factory=dict)
    residuals: list[Residual] = field(default_factory=list)

    def add(self, row: RecordedRow) -> None:
        """Predict for one row and count it."""
        if row.kind is not Kind.TRAIN_STEP or row.outcome not in (DONE, OUT_OF_MEMORY):
            self.counts["other"] += 1
            return
        try:
            plan = parse_plan(row.spec["plan"])
            prediction = predict(plan).to_dict()
        except PlanError as error:
            self.not_predicted[row.id] = str(error)
            return
        workload = plan.workload
        if not isinstance(workload, TrainingWorkload):
            self.counts["other"] += 1
            return
        self.counts[row.role.value] += 1
        self._judge_verdict(row, prediction["verdict"]["state"])
        if row.outcome == DONE:
            groups = groups_of(plan, workload, row)
            self.residuals += [
                Residual(row_id=row.id, role=row.role, comparison=found, groups=groups)
                for found in compare(prediction, row.measured, str(row.spec.get("world")))
            ]

    def _judge_verdict(self, row: RecordedRow, state: str) -> None:
        if row.role is Role.CALIBRATION or row.spec.get("world") == "cpu":
            return
        refused = state == "does_not_fit"
        if row.outcome == OUT_OF_MEMORY and not refused:
            self.false_fits.append(row.id)
        if row.outcome == DONE and refused:
            self.false_does_not_fit.append(row.id)


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
        false_fits=tuple(tally.false_fits),
        false_does_not_fit=tuple(tally.false_does_not_fit),
        not_predicted=tally.not_predicted,
        residuals=tuple(tally.residuals),
    )


def breaches(report: AccuracyReport, bounds: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each bound of recorded/bounds.json that the report breaks."""
    found = []
    for quantity, limits in bounds["quantities"].items():
        statistics = report.overall().get(quantity)
        if statistics is None:
            found.append(f"there is no evidence for {quantity}")
            continue
        for name, limit in limits.items():
            value = abs(getattr(statistics, name))
            if value > limit:
                found.append(f"{quantity} {name} is {value:.2f}: the bound is {limit}")
    for name in ("false_fits", "false_does_not_fit"):
        if len(getattr(report, name)) > bounds[name]:
            found.append(f"{name}: {', '.join(getattr(report, name))}")
    if report.not_predicted:
        found.append(f"not predicted: {', '.join(report.not_predicted)}")
    return found
