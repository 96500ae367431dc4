"""Peaks by number of ranks for every stage and engine of a model: measured, or why they are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import PlanError
from planner.memory.ideal import ideal_bytes
from planner.memory.stages import step_memory
from planner.obstacles import check_training
from planner.plan import parse_plan
from planner.records import Kind, RecordedRow
from planner.stage_points import ORDER, Point, work_title
from planner.verdict import State, judge
from planner.workload import Engine, Parallelism

# Engine (its place in `ORDER`), stage, ranks.
Place = tuple[int, int, int]
_OUT_OF_MEMORY = "oom_device"


class Known(StrEnum):
    """How the peak of a cell is known."""

    MEASURED = "measured"
    ANOTHER_NUMBER = "measured at another number of ranks"
    OUT_OF_MEMORY = "out of memory"
    DOES_NOT_FIT = "does not fit"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A peak at one number of ranks: the measured one where a run has one, else the predicted."""

    size_bytes: int
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakLine:
    """One stage of an engine; None where the engine cannot run it over that many ranks."""

    engine: Engine
    stage: int
    cells: tuple[Cell | None, ...]


def out_of_memory_places(rows: Iterable[RecordedRow]) -> dict[str, set[Place]]:
    """Return where one rank alone ran out of memory, by the title of model and workload."""
    found: dict[str, set[Place]] = {}
    for row in rows:
        if row.kind is not Kind.TRAIN_STEP or row.outcome != _OUT_OF_MEMORY:
            continue
        if row.spec["world"] != "solo":
            continue
        plan = parse_plan(row.spec["plan"])
        spread = plan.parallelism
        place = (ORDER[spread.engine], spread.zero_stage, spread.world_size)
        found.setdefault(work_title(plan), set()).add(place)
    return found


def peak_lines(
    points: Sequence[Point], ranks: Sequence[int], failed: Collection[Place] = ()
) -> list[PeakLine]:
    """Return a line for every stage of the engines that `points` (one work's) measured.

    `failed` are places in which one rank alone ran out of memory.
    """
    engines = [e for e in Engine if any(p.plan.parallelism.engine is e for p in points)]
    stages = sorted({point.place[1] for point in points})
    lines = (
        PeakLine(
            engine=engine,
            stage=stage,
            cells=tuple(peaks_by_ranks(points, engine, stage, ranks, failed)),
        )
        for stage in stages
        for engine in engines
    )
    return [line for line in lines if any(line.cells)]


def peaks_by_ranks(
    points: Sequence[Point],
    engine: Engine,
    stage: int,
    ranks: Sequence[int],
    failed: Collection[Place] = (),
) -> list[Cell | None]:
    """Return the peak of one stage of an engine at each number of ranks: of one rank alone where it
    was measured, else predicted; None where the engine cannot run it."""
    measured = {
        point.place[2]: point.measured_bytes
        for point in points
        if point.row.spec["world"] == "solo" and point.place[:2] == (ORDER[engine], stage)
    }
    found: list[Cell | None] = []
    alike = set(measured.values())
    # Stage 0 shards nothing: a rank alone asks for the same whatever the others are, so where all numbers
    # of ranks that ran measured one peak, any other has it.
    is_alike = stage == 0 and len(alike) == 1 and len(measured) > 1
    for number in ranks:
        if number in measured:
            found.append(Cell(size_bytes=measured[number], known=Known.MEASURED))
        elif is_alike:
            found.append(Cell(size_bytes=max(alike), known=Known.ANOTHER_NUMBER))
        else:
            has_failed = (ORDER[engine], stage, number) in failed
            found.append(_predicted_cell(points[0], engine, stage, number, has_failed))
    return found


def _predicted_cell(
    like: Point, engine: Engine, stage: int, ranks: int, has_failed: bool
) -> Cell | None:
    plan = like.plan
    spread = replace(plan.parallelism, engine=engine, zero_stage=stage, world_size=ranks)
    try:
        check_training(plan.model, like.workload, spread)
    except PlanError:
        return None
    memory = step_memory(plan.model, like.workload, spread, plan.hardware).worst
    known = Known.OUT_OF_MEMORY if has_failed else Known.PREDICTED
    verdict = judge(memory.overheads.device_bytes, plan.hardware.visible_bytes)
    if not has_failed and verdict.state is State.DOES_NOT_FIT:
        known = Known.DOES_NOT_FIT
    return Cell(size_bytes=memory.allocated_bytes, known=known)


def count_cells(tables: Mapping[str, Sequence[PeakLine]]) -> Counter[Known]:
    """Return how many cells of all tables are known in which way; those no engine runs are none."""
    lines = [line for table in tables.values() for line in table]
    return Counter(cell.known for line in lines for cell in line.cells if cell is not None)


def ideals_by_ranks(like: Point, stage: int, ranks: Sequence[int]) -> list[int]:
    """Return the ideal of a stage at each number of ranks."""
    plan = like.plan
    found = []
    for number in ranks:
        spread = Parallelism(engine=Engine.PEAKMARK, zero_stage=stage, world_size=number)
        size_bytes = ideal_bytes(plan.model, like.workload, spread, plan.hardware)
        assert size_bytes is not None, "plans that split the model are not shown"
        found.append(size_bytes)
    return found
