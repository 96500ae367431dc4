"""Our engine's measured steps beside its peers' at the same plan, ranks and world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.memory.stages import step_memory
from planner.plan import Plan
from planner.stage_points import Point
from planner.workload import Engine
from planner.zero import training


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A point of ours and a peer's."""

    own: Point
    peer: Point

    @property
    def ratio(self) -> float:
        """Our allocated peak over the peer's."""
        return self.own.measured_bytes / self.peer.measured_bytes

    @property
    def reserved_ratio(self) -> float | None:
        """Our reserved peak over the peer's; None where one was not measured."""
        ours, theirs = reserved_bytes(self.own), reserved_bytes(self.peer)
        return ours / theirs if ours and theirs else None


def engine_pairs(points: Sequence[Point]) -> list[Pair]:
    """Return our row beside each peer's of the same stage, ranks and world, of one work's points."""
    own = {_place(p): p for p in points if p.plan.parallelism.engine is Engine.PEAKMARK}
    return [
        Pair(own=own[_place(peer)], peer=peer)
        for peer in points
        if peer.plan.parallelism.engine is not Engine.PEAKMARK and _place(peer) in own
    ]


def _place(point: Point) -> tuple[Any, ...]:
    return point.place[1], point.place[2], point.row.spec["world"]


def reserved_bytes(point: Point) -> int:
    """Return what the allocator's segments took at the most; 0 where it was not measured."""
    return int(point.row.measured.get("reserved_bytes") or 0)


def expandable_bytes(plan: Plan) -> int:
    """Return what a training plan's segments take, predicted, where they may grow."""
    workload = replace(training(plan), expandable_segments=True)
    memory = step_memory(plan.model, workload, plan.parallelism, plan.hardware).worst
    return int(memory.overheads.reserved_bytes)
