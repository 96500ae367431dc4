"""Stored runs that speak to a claim: attention calls by shape, training steps by plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from planner.attention.measured import Seen, best_of, seen_in_row
from planner.attention.problem import AttentionProblem, Variant
from planner.claims.claim import Measured
from planner.plan import Plan
from planner.records import Kind
from planner.zero import work_of


class Row(Protocol):
    """A measurement, recorded or in the database."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def kind(self) -> str:
        """The job."""

    @property
    def outcome(self) -> str:
        """How it ended."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The job spec."""

    @property
    def measured(self) -> Mapping[str, Any]:
        """What it measured."""

    @property
    def environment(self) -> Mapping[str, Any]:
        """Where."""


@dataclass(frozen=True)
class Evidence:
    """Rows by what they measured; `here` are the ids of those that this database's runs made."""

    rows: tuple[Row, ...] = ()
    here: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def _calls(self) -> list[Seen]:
        return [
            seen
            for row in self.rows
            if row.kind == Kind.ATTENTION
            for seen in seen_in_row(
                row.spec, row.measured, row.environment, row=row.id, here=row.id in self.here
            )
            if seen.world != "cpu" and seen.outcome == "done"
        ]

    @cached_property
    def _steps(self) -> dict[tuple[str, str, int, int], Row]:
        """The newest row that ended well of each work, engine, stage and world size."""
        return {
            (work, str(spread["engine"]), spread["zero_stage"], spread["world_size"]): row
            for row in self.rows
            if row.kind == Kind.TRAIN_STEP and row.outcome == "done" and _on_gpu(row)
            for work, spread in [work_of(row.spec["plan"])]
        }

    def call(self, problem: AttentionProblem, variant: Variant) -> Seen | None:
        """Return the best measurement of a variant at exactly a problem."""
        return best_of(one for one in self._calls if one.is_of(problem)).get(variant)

    def step(self, plan: Plan) -> Row | None:
        """Return the newest run of a plan's work, engine, stage and world size on a GPU."""
        work, spread = work_of(plan.to_dict())
        key = (work, str(spread["engine"]), spread["zero_stage"], spread["world_size"])
        return self._steps.get(key)


def _on_gpu(row: Row) -> bool:
    return row.spec.get("world") != "cpu" and "allocated_bytes" in row.measured


def of_calls(condition: str, value: float, seen: Iterable[Seen]) -> Measured:
    """Return a measured figure made of attention calls."""
    used = list(seen)
    return Measured(
        condition=condition,
        value=value,
        rows=tuple(dict.fromkeys(str(one.row) for one in used)),
        gpu=used[0].gpu,
        world=used[0].world,
        here=all(one.here for one in used),
    )


def of_steps(condition: str, value: float, rows: Iterable[Row], here: frozenset[str]) -> Measured:
    """Return a measured figure made of training steps."""
    used = list(rows)
    first = used[0]
    return Measured(
        condition=condition,
        value=value,
        rows=tuple(row.id for row in used),
        gpu=str((first.environment.get("gpu") or {}).get("name") or "unknown GPU"),
        world=str(first.spec.get("world")),
        here=all(row.id in here for row in used),
    )
