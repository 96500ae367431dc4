"""Real ranks over NCCL beside what one rank alone on its GPU had said of the same plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from planner.collective_times import are_calls_apart, collective_times_s
from planner.communication import RING_PASSES
from planner.records import Kind
from planner.zero import work_of

REAL, ALONE = "nccl", "solo"
_SIZES = ("allocated_bytes", "reserved_bytes", "device_bytes")


class Row(Protocol):
    """A measurement, recorded or in the database."""

    @property
    def kind(self) -> str:
        """The job."""

    @property
    def recorded_at(self) -> Any:
        """When it was made; later ones compare greater."""

    @property
    def outcome(self) -> str:
        """How it ended."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The job spec."""

    @property
    def measured(self) -> Mapping[str, Any]:
        """What it measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """All calls of one collective in a traced step, each without the wait for other ranks.

    `bus_bytes_s` is what its link carried a second, as nccl-tests define it.
    """

    collective: str
    calls: int
    payload_bytes: int
    time_s: float
    bus_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """A run over NCCL, the same plan's run in `solo` where there is one, and whose losses to compare.

    `reference` is our engine's run at the lowest stage that ran.
    """

    row: Row
    alone: Row | None
    reference: Row | None

    @property
    def exposed_s(self) -> float | None:
        """How long only collectives ran in the traced step, on the rank where that was least."""
        ranks = self.row.measured.get("kernel_times")
        return min(float(rank["exposed_s"]) for rank in ranks) if ranks else None

    @property
    def holds_waits(self) -> bool:
        """Whether the times of collectives are sums in which a rank waits for the others."""
        ranks = self.row.measured.get("kernel_times") or []
        return bool(ranks) and not are_calls_apart(ranks)

    @property
    def ranks_apart_bytes(self) -> int:
        """How far any memory counter of a rank is from another rank's; 0 where they are all alike."""
        ranks = self.row.measured.get("per_rank") or [{}]
        seen = ([int(rank.get(name) or 0) for rank in ranks] for name in _SIZES)
        return max(max(sizes) - min(sizes) for sizes in seen)

    @property
    def loss_distance(self) -> float | None:
        """Largest difference of a step's loss from the reference's, over the steps that both measured.

        None where there is nothing to compare.
        """
        if self.reference is None:
            return None
        ours, theirs = _losses(self.row), _losses(self.reference)
        apart = [abs(ours[step] - theirs[step]) for step in ours.keys() & theirs.keys()]
        return max(apart, default=None)

    def collectives(self) -> list[CollectiveTime]:
        """Return the time of each collective; empty where no step was traced."""
        counted = self.row.measured.get("communication") or {}
        ranks = self.row.measured.get("kernel_times") or []
        num_ranks = self.row.spec["plan"]["parallelism"]["world_size"]
        times_s = collective_times_s(ranks)
        found = []
        for name, sent in counted.items():
            if name in times_s:
                time_s = times_s[name]
                moved = RING_PASSES.get(name, 1) * sent["bytes"] * (num_ranks - 1) / num_ranks
                found.append(
                    CollectiveTime(
                        collective=name,
                        calls=sent["calls"],
                        payload_bytes=sent["bytes"],
                        time_s=time_s,
                        bus_bytes_s=moved / time_s,
                    )
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return one plain line of a table; what was not measured is None."""
        seen = self.row.measured
        alone: Mapping[str, Any] = {} if self.alone is None else self.alone.measured
        spread = work_of(self.row.spec["plan"])[1]
        sizes = {
            f"{place}{name}": found.get(name) or None
            for name in _SIZES
            for place, found in (("", seen), ("alone_", alone))
        }
        return {
            "engine": spread["engine"],
            "stage": spread["zero_stage"],
            "ranks": spread["world_size"],
            **sizes,
            "step_ms": _ms(seen.get("step_time_s")),
            "alone_step_ms": _ms(alone.get("step_time_s")),
            "exposed_ms": _ms(self.exposed_s),
            "collectives": self.collectives(),
            "loss_distance": self.loss_distance,
        }


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else 1000 * time_s


def real_runs(rows: Iterable[Row]) -> list[RealRun]:
    """Return every plan's newest run of several ranks over NCCL, of traced ones if there are, in the
    order of work.

    Runs that went on from a saved step are left out: their losses are of other steps.
    """
    newest: dict[tuple[str, str, str], Row] = {}
    for row in sorted(rows, key=_worth):
        is_whole = row.kind == Kind.TRAIN_STEP and row.outcome == "done"
        if is_whole and row.spec.get("load_from") is None:
            newest[_key(row.spec, str(row.spec["world"]))] = row
    runs = [
        RealRun(
            row=row,
            alone=newest.get((work, spread, ALONE)),
            reference=next((newest[key] for key in _stages(row.spec) if key in newest), None),
        )
        for (work, spread, world), row in newest.items()
        if world == REAL and work_of(row.spec["plan"])[1]["world_size"] > 1
    ]
    return sorted(runs, key=lambda run: _place(run.row))


def _worth(row: Row) -> tuple[bool, Any]:
    """Order rows of one plan: a traced run over NCCL is worth more than a newer one."""
    is_traced = row.spec["world"] == REAL and bool(row.measured.get("kernel_times"))
    return is_traced, row.recorded_at


def _losses(row: Row) -> dict[int, float]:
    """Return the losses by the number of the step; none where one of them was no number."""
    losses = row.measured.get("losses") or ()
    if None in losses:
        return {}
    return dict(enumerate(map(float, losses), start=int(row.spec.get("warmup") or 0)))


def _key(spec: Mapping[str, Any], world: str) -> tuple[str, str, str]:
    work, spread = work_of(spec["plan"])
    return work, str(spread), world


def _stages(spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys of our engine's stages at the same work and ranks, the lowest first."""
    plan = spec["plan"]
    spreads = ({**plan["parallelism"], "engine": "peakmark", "zero_stage": s} for s in range(4))
    return [_key({"plan": {**plan, "parallelism": spread}}, REAL) for spread in spreads]


def _place(row: Row) -> tuple[Any, ...]:
    work, spread = work_of(row.spec["plan"])
    return work, spread["engine"] != "peakmark", spread["engine"], spread["zero_stage"]
