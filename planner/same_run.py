"""Our engine's step beside a peer's, timed in turns on one GPU within one run.

Rows that `runners/bench_engines.py` recorded carry `measured["same_run"]`: the run, the pair and the
turn they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median
from typing import Any

OURS = "peakmark"
TURNS_OF_A_PAIR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEngine:
    """One engine's steps over both of its turns.

    `step_s` is the median of all timed steps, `host_s` that of the host's time to start one, and
    `busy_s` how long the GPU ran anything in a step (None where no step was traced).
    """

    engine: str
    steps: int
    step_s: float
    host_s: float
    busy_s: float | None

    @property
    def idle_s(self) -> float | None:
        """How long the GPU waited in a step: for launches, for the host."""
        return None if self.busy_s is None else max(0.0, self.step_s - self.busy_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SameRunPair:
    """Ours and a peer at one plan: stage, ranks and work of `plan`, a stored plan's document."""

    run_id: str
    plan: Mapping[str, Any] = field(hash=False)
    ours: TimedEngine
    peer: TimedEngine

    @property
    def place(self) -> tuple[str, int, int]:
        """The peer's engine, its stage and the number of ranks."""
        spread = self.plan["parallelism"]
        return self.peer.engine, spread["zero_stage"], spread["world_size"]

    @property
    def ratio(self) -> float:
        """Step time of ours over the peer's."""
        return self.ours.step_s / self.peer.step_s

    @property
    def busy_ratio(self) -> float | None:
        """The GPU's busy time of ours over the peer's."""
        if self.ours.busy_s is None or not self.peer.busy_s:
            return None
        return self.ours.busy_s / self.peer.busy_s

    def to_dict(self) -> dict[str, Any]:
        """Return one plain line of a table; times in milliseconds."""
        engine, stage, ranks = self.place
        workload = self.plan.get("workload", {})
        return {
            "model": self.plan["model"].get("preset") or self.plan["model"].get("name"),
            "checkpointing": workload.get("checkpointing", "none"),
            "stage": stage,
            "ranks": ranks,
            "peer": engine,
            "ours_ms": 1000 * self.ours.step_s,
            "peer_ms": 1000 * self.peer.step_s,
            "ratio": self.ratio,
            "ours_busy_ms": _ms(self.ours.busy_s),
            "peer_busy_ms": _ms(self.peer.busy_s),
            "ours_idle_ms": _ms(self.ours.idle_s),
            "peer_idle_ms": _ms(self.peer.idle_s),
            "ours_host_ms": 1000 * self.ours.host_s,
            "peer_host_ms": 1000 * self.peer.host_s,
            "steps": min(self.ours.steps, self.peer.steps),
        }


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else 1000 * time_s


def same_run_pairs(
    rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[SameRunPair]:
    """Return the whole pairs among `rows`, (spec, measured) each, in the order of their runs."""
    groups: dict[tuple[str, int], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for spec, measured in rows:
        turn = measured.get("same_run")
        if turn and measured.get("step_times_s"):
            groups.setdefault((turn["id"], turn["pair"]), []).append((spec, measured))
    return [
        _pair(run_id, turns)
        for (run_id, _), turns in groups.items()
        if len(turns) == TURNS_OF_A_PAIR
    ]


def _pair(run_id: str, turns: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> SameRunPair:
    sides: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
    plans: dict[bool, Mapping[str, Any]] = {}
    for spec, measured in turns:
        is_ours = spec["plan"]["parallelism"]["engine"] == OURS
        sides[is_ours].append(measured)
        plans[is_ours] = spec["plan"]
    peer = str(plans[False]["parallelism"]["engine"])
    return SameRunPair(
        run_id=run_id,
        plan=plans[True],
        ours=_timed(OURS, sides[True]),
        peer=_timed(peer, sides[False]),
    )


def _timed(engine: str, turns: Sequence[Mapping[str, Any]]) -> TimedEngine:
    steps_s = [time_s for measured in turns for time_s in measured["step_times_s"]]
    hosts_s = [time_s for measured in turns for time_s in measured["host_times_s"]]
    traced = [ranks[0]["busy_s"] for measured in turns if (ranks := measured.get("kernel_times"))]
    return TimedEngine(
        engine=engine,
        steps=len(steps_s),
        step_s=median(steps_s),
        host_s=median(hosts_s),
        busy_s=median(traced) if traced else None,
    )


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of positive ratios."""
    return exp(sum(map(log, ratios)) / len(ratios))
