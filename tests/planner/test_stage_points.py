"""Peaks by number of ranks: measured where a rank ran alone, else predicted, else not there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.records import Kind, RecordedRow, Role
from planner.stage_cells import (
    Known,
    count_cells,
    ideals_by_ranks,
    out_of_memory_places,
    peak_lines,
    peaks_by_ranks,
)
from planner.stage_pairs import engine_pairs, expandable_bytes
from planner.stage_points import FEWEST_POINTS, stage_points
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


def row(
    minute: int, ranks: int, world: str = "solo", outcome: str = "done", **spread: Any
) -> RecordedRow:
    return RecordedRow(
        id=f"{minute:016}",
        kind=Kind.TRAIN_STEP,
        recorded_at=datetime(2026, 1, 1, 0, minute, tzinfo=UTC),
        role=Role.EVIDENCE,
        spec={"kind": "train_step", "world": world, "plan": plan(ranks, **spread)},
        outcome=outcome,
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
    assert [cell and cell.known for cell in found] == [
        *(Known.MEASURED, Known.MEASURED, Known.PREDICTED)
    ]
    assert [cell and cell.size_bytes for cell in found[:2]] == [2 * GIB, 7 * GIB]
    expected = predict(parse_plan(plan(512))).to_dict()["memory"]["allocated_bytes"]
    assert found[2] is not None
    assert found[2].size_bytes == pytest.approx(expected, rel=1e-3)
    assert peaks_by_ranks(points, Engine.DDP, 0, (2,)) == [None]  # it has no fp32 master
    assert peaks_by_ranks(points, Engine.PEAKMARK, 2, (2,))[0] is not None
    # Ours at 2 and 8 of three, FSDP2's stage 2 at 2: real ranks and other numbers are no cells, and
    # neither engine's other stage was measured at all.
    lines = peak_lines(points, (2, 8, 512))
    assert [(line.engine, line.stage) for line in lines] == [
        *((Engine.PEAKMARK, 2), (Engine.FSDP2, 2), (Engine.PEAKMARK, 3), (Engine.FSDP2, 3))
    ]
    assert count_cells({title: lines}) == {Known.MEASURED: 3, Known.PREDICTED: 9}


def test_the_ideal_of_stage_0_does_not_depend_on_ranks_and_that_of_3_shrinks() -> None:
    rows = [row(i, ranks) for i, ranks in enumerate((1, 2, 4, 8, 16, 32))]
    [points] = stage_points(rows).values()
    whole = ideals_by_ranks(points[0], 0, (1, 8))
    assert whole[0] == whole[1]
    one, eight = ideals_by_ranks(points[0], 3, (1, 8))
    # fp32 master and two moments of 494,032,768 parameters, of which seven eighths go.
    assert one - eight == pytest.approx(12 * 494_032_768 * 7 / 8, rel=0.1)


def test_a_cell_that_cannot_be_measured_says_why() -> None:
    rows = [row(i, ranks) for i, ranks in enumerate((1, 2, 4, 8, 16, 32))]
    rows.append(row(7, 64, outcome="oom_device"))
    rows.append(row(8, 2, world="nccl", outcome="oom_device"))
    [(title, points)] = stage_points(rows).items()
    failed = out_of_memory_places(rows)
    assert failed == {title: {(0, 3, 64)}}
    [cell] = peaks_by_ranks(points, Engine.PEAKMARK, 3, (64,), failed[title])
    assert cell is not None and cell.known is Known.OUT_OF_MEMORY
    # A GPU of 6 GB: 16 bytes of each of 494 million parameters are 7.9 GB on one rank, 0.1 on 64.
    small = [replace(point, plan=smaller(point.plan)) for point in points]
    [zero, three] = [peaks_by_ranks(small, Engine.PEAKMARK, stage, (64,))[0] for stage in (0, 3)]
    assert zero is not None and zero.known is Known.DOES_NOT_FIT
    assert three is not None and three.known is Known.PREDICTED


def smaller(plan: Plan) -> Plan:
    return replace(plan, hardware=replace(plan.hardware, visible_bytes=6 * 10**9))


def test_a_peer_stands_beside_ours_at_the_same_stage_ranks_and_world() -> None:
    rows = [row(i, ranks) for i, ranks in enumerate((1, 2, 8, 64))]
    # 6 GiB of FSDP2 beside our 3 at 8 ranks; its other rows have no like.
    rows += [
        row(5, 8, engine="fsdp2"),
        row(6, 4, engine="fsdp2"),
        row(7, 8, stage=2, engine="fsdp2"),
    ]
    rows[2].measured["reserved_bytes"], rows[4].measured["reserved_bytes"] = 10 * GIB, 8 * GIB
    [points] = stage_points(rows).values()
    [pair] = engine_pairs(points)
    assert (pair.own.place, pair.peer.place) == ((0, 3, 8), (1, 3, 8))
    assert (pair.ratio, pair.reserved_ratio) == (0.5, 1.25)


def test_segments_that_may_grow_hold_little_more_than_what_is_used() -> None:
    document = plan(64)
    fixed = predict(parse_plan(document)).memory
    grown = expandable_bytes(parse_plan(document))
    assert fixed["allocated_bytes"] < grown < fixed["reserved_bytes"]


def test_stage_0_is_known_at_every_number_of_ranks_once_two_agree() -> None:
    rows = [row(i, ranks) for i, ranks in enumerate((1, 2, 4, 8))]
    rows += [row(5, 2, stage=0), row(5, 8, stage=0)]
    [points] = stage_points(rows).values()
    cells = peaks_by_ranks(points, Engine.PEAKMARK, 0, (2, 64))
    assert [cell and (cell.known, cell.size_bytes) for cell in cells] == [
        (Known.MEASURED, 6 * GIB),
        (Known.ANOTHER_NUMBER, 6 * GIB),
    ]
    rows[-1].measured["allocated_bytes"] = 7 * GIB
    [points] = stage_points(rows).values()
    [cell] = peaks_by_ranks(points, Engine.PEAKMARK, 0, (64,))
    assert cell is not None and cell.known is Known.PREDICTED
