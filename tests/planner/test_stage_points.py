"""Peaks by number of ranks: measured where a rank ran alone, else predicted, else not there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from planner.plan import parse_plan
from planner.predict import predict
from planner.records import Kind, RecordedRow, Role
from planner.stage_points import (
    FEWEST_POINTS,
    ideals_by_ranks,
    measured_cells,
    peaks_by_ranks,
    stage_points,
)
from planner.workload import Engine

GIB = 2**30


def plan(ranks: int, stage: int = 3, engine: str = "peakmark") -> dict[str, Any]:
    return {
        "schema": 1,
        "job": "train",
        "model": {"preset": "Qwen/Qwen2.5-0.5B"},
        "workload": {"sequence_length": 1024, "precision": "mixed"},
        "parallelism": {"engine": engine, "zero_stage": stage, "world_size": ranks},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }


def row(minute: int, ranks: int, world: str = "solo", **spread: Any) -> RecordedRow:
    return RecordedRow(
        id=f"{minute:016}",
        kind=Kind.TRAIN_STEP,
        recorded_at=datetime(2026, 1, 1, 0, minute, tzinfo=UTC),
        role=Role.EVIDENCE,
        spec={"kind": "train_step", "world": world, "plan": plan(ranks, **spread)},
        outcome="done",
        measured={"allocated_bytes": (minute + 1) * GIB, "communication": {}},
        environment={"versions": {"transformers": "5.17.0"}},
    )


def test_a_peak_is_measured_alone_else_predicted_else_missing() -> None:
    rows = [row(i, ranks) for i, ranks in enumerate((1, 2, 8, 64))]
    rows += [row(4, 2, world="nccl"), row(5, 2, stage=2, engine="fsdp2"), row(6, 8)]
    [(title, points)] = stage_points(rows).items()
    assert title.startswith("Qwen2.5-0.5B, 1 x 1,024 tokens, mixed")
    # The newest row of each choice: of 8 ranks that of minute 6.
    assert len(points) == FEWEST_POINTS
    found = peaks_by_ranks(points, Engine.PEAKMARK, 3, (2, 8, 512))
    assert [cell and cell.is_measured for cell in found] == [True, True, False]
    assert [cell and cell.size_bytes for cell in found[:2]] == [2 * GIB, 7 * GIB]
    expected = predict(parse_plan(plan(512))).to_dict()["memory"]["allocated_bytes"]
    assert found[2] is not None
    assert found[2].size_bytes == pytest.approx(expected, rel=1e-3)
    assert peaks_by_ranks(points, Engine.DDP, 0, (2,)) == [None]  # it has no fp32 master
    assert peaks_by_ranks(points, Engine.PEAKMARK, 2, (2,))[0] is not None
    # Ours at 2 and 8 of three, FSDP2's stage 2 at 2: real ranks and other numbers are no cells.
    assert measured_cells({title: points}, (2, 8, 512)) == (3, 6)


def test_the_ideal_of_stage_0_does_not_depend_on_ranks_and_that_of_3_shrinks() -> None:
    rows = [row(i, ranks) for i, ranks in enumerate((1, 2, 4, 8, 16, 32))]
    [points] = stage_points(rows).values()
    whole = ideals_by_ranks(points[0], 0, (1, 8))
    assert whole[0] == whole[1]
    one, eight = ideals_by_ranks(points[0], 3, (1, 8))
    # fp32 master and two moments of 494,032,768 parameters, of which seven eighths go.
    assert one - eight == pytest.approx(12 * 494_032_768 * 7 / 8, rel=0.1)
