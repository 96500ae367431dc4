"""Measured steps by stage, engine and ranks, each beside its prediction and the ideal of its stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.accuracy import DONE, AccuracyReport, accuracy_report
from planner.memory.ideal import ideal_bytes
from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.parallel import is_split
from planner.memory.stages import step_memory
from planner.payloads import step_payloads
from planner.plan import Plan, parse_plan
from planner.records import Kind, RecordedRow
from planner.workload import Engine, TrainingWorkload, field_words, written_dict
from planner.zero import named_parts, work_of

# A model and workload is shown where that many choices of engine, stage and ranks were measured.
FEWEST_POINTS = 6
ORDER = {engine: number for number, engine in enumerate(Engine)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured row with its prediction; sizes in bytes, `parts` by the names of planner.zero."""

    row: RecordedRow
    plan: Plan
    workload: TrainingWorkload
    predicted_bytes: float
    ideal_bytes: int
    parts: Mapping[str, int]

    @property
    def above_percent(self) -> float:
        """How far the measured peak is above the ideal."""
        return 100 * (self.measured_bytes - self.ideal_bytes) / self.ideal_bytes

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the row stands in its table: engine, stage, ranks."""
        spread = self.plan.parallelism
        return ORDER[spread.engine], spread.zero_stage, spread.world_size

    @property
    def measured_bytes(self) -> int:
        """The measured peak."""
        return int(self.row.measured["allocated_bytes"])

    @property
    def counted(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes of every collective that the run counted."""
        seen = self.row.measured.get("communication") or {}
        return {name: (found["calls"], found["bytes"]) for name, found in seen.items()}

    def formula(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes of every collective by the formula."""
        spread = self.plan.parallelism
        found = step_payloads(
            self.plan.model, self.workload, spread.engine, spread.zero_stage, spread.world_size
        )
        return {payload.collective: (int(payload.calls), int(payload.bytes)) for payload in found}


def stage_points(
    rows: Iterable[RecordedRow], report: AccuracyReport | None = None
) -> dict[str, list[Point]]:
    """Return the points of every model and workload, by its title, in the order of their places.

    Predicts for the rows that are shown; `report` spares it where all rows were predicted.
    """
    groups = _wanted(rows)
    shown = [row for found in groups.values() for row, _ in found]
    residuals = (report or accuracy_report(shown)).residuals
    predicted = {
        residual.row_id: residual.comparison.predicted
        for residual in residuals
        if residual.comparison.quantity == "allocated"
    }
    return {
        title: sorted((_point(*pair, predicted) for pair in found), key=lambda point: point.place)
        for title, found in groups.items()
    }


def _point(row: RecordedRow, plan: Plan, predicted: Mapping[str, float]) -> Point:
    assert isinstance(plan.workload, TrainingWorkload)
    chosen = plan.model, plan.workload, plan.parallelism, plan.hardware
    memory = step_memory(*chosen, TYPICAL_SEGMENT_SHARE).worst
    ideal = ideal_bytes(*chosen)
    assert ideal is not None
    parts = named_parts(memory)
    # Rounding to blocks is part of the rest.
    parts["other"] += round(predicted[row.id]) - memory.allocated_bytes
    return Point(
        row=row,
        plan=plan,
        workload=plan.workload,
        predicted_bytes=predicted[row.id],
        ideal_bytes=ideal,
        parts=parts,
    )


def _wanted(rows: Iterable[RecordedRow]) -> dict[str, list[tuple[RecordedRow, Plan]]]:
    """Group measured steps by model and workload; of one choice the newest row stays."""
    works: dict[str, dict[str, RecordedRow]] = {}
    for row in sorted(rows, key=lambda row: row.recorded_at):
        is_step = row.kind is Kind.TRAIN_STEP and row.outcome == DONE
        if is_step and row.measured.get("allocated_bytes"):
            work, spread = work_of(row.spec["plan"])
            works.setdefault(work, {})[f"{spread} {row.spec['world']}"] = row
    groups = {}
    for found in works.values():
        if len(found) >= FEWEST_POINTS:
            pairs = [(row, parse_plan(row.spec["plan"])) for row in found.values()]
            if not is_split(pairs[0][1].parallelism):
                groups[work_title(pairs[0][1])] = pairs
    return dict(sorted(groups.items()))


def work_title(plan: Plan) -> str:
    """Return model and workload in words: the shape, and what is not at its default."""
    workload = plan.workload
    assert isinstance(workload, TrainingWorkload)
    name = plan.model.name.rsplit("/", 1)[-1]
    written = written_dict(workload)
    shape = f"{written.pop('micro_batch')} x {written.pop('sequence_length'):,} tokens"
    words = [shape, *(str(written.pop(key)) for key in ("precision", "attention", "optimizer"))]
    words.append(f"checkpointing {written.pop('checkpointing')}")
    if written.pop("grad_accumulation") > 1:
        words.append(f"{workload.grad_accumulation} micro-batches")
    words += [f"{field_words(key)} {value}" for key, value in written.items()]
    return f"{name}, {', '.join(words)}"
