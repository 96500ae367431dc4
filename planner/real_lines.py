"""A run over NCCL in words, beside what one rank alone had measured of the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.plan import parse_plan
from planner.real_ranks import RealRun
from planner.stage_points import work_title
from planner.units import GIB_BYTES

_COUNTERS = ("allocated", "reserved", "device")


def real_line(run: RealRun) -> dict[str, str]:
    """Return one plain line of a table; sizes in GiB of rank 0, times in ms, rates in GB/s."""
    plan = parse_plan(run.row.spec["plan"])
    spread, seen = plan.parallelism, run.row.measured
    alone: Mapping[str, Any] = {} if run.alone is None else run.alone.measured
    places = (("", seen), (" alone", alone))
    exposed, losses = run.exposed_s, run.loss_distance
    return {
        "plan": work_title(plan),
        "engine": str(spread.engine),
        "stage": str(spread.zero_stage),
        "N": str(spread.world_size),
        **{
            f"{name}{place}": _gib(figures.get(f"{name}_bytes"))
            for name in _COUNTERS
            for place, figures in places
        },
        **{f"step ms{place}": _ms(figures.get("step_time_s")) for place, figures in places},
        "exposed ms": _ms(exposed),
        "collectives": _collectives(run) or "-",
        "losses": "-" if losses is None else f"{losses:.1e}" if losses else "equal",
    }


def _collectives(run: RealRun) -> str:
    sent = "; ".join(
        f"{one.collective.replace('_', '-')} {one.calls} x, {_gib(one.payload_bytes)} GiB in "
        f"{_ms(one.time_s)} ms, {one.bus_bytes_s / 1e9:.0f} GB/s"
        for one in run.collectives()
    )
    return f"{sent}; with waits" if sent and run.holds_waits else sent


def _gib(size_bytes: float | None) -> str:
    return f"{size_bytes / GIB_BYTES:.2f}" if size_bytes else "-"


def _ms(time_s: float | None) -> str:
    return "-" if time_s is None else f"{1000 * time_s:.1f}"
