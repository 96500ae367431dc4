"""Runs whose optimizer was in host memory, beside the same plans with it on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.memory.offload import host_ledger
from planner.offload import host_step
from planner.plan import parse_plan
from planner.stage_points import work_title
from planner.units import GIB_BYTES
from planner.workload import TrainingWorkload
from planner.zero import work_of

Seen = tuple[Mapping[str, Any], Mapping[str, Any]]


def offloaded_lines(seen: Iterable[Seen], work: str | None = None) -> list[dict[str, str]]:
    """Return a plain line of each run among `seen`, (spec, measured) each, that offloaded.

    `work` (see `planner.zero.work_of`) leaves out other models and workloads, offloading apart.
    Sizes are GiB, times ms; "kept" is the newest run of the same plan with the optimizer on the
    device, and "adds" the least that the host adds to a step (`planner.offload.host_step`).
    """
    steps = [
        (spec, measured)
        for spec, measured in seen
        if spec.get("plan") and measured.get("allocated_bytes")
    ]
    newest = {(*_place(spec["plan"]), spec["world"]): measured for spec, measured in steps}
    lines = []
    for spec, measured in steps:
        kept = _kept(spec["plan"])
        if kept == spec["plan"] or (work is not None and work_of(kept)[0] != work):
            continue
        lines.append(_line(spec["plan"], measured, newest.get((*_place(kept), spec["world"]), {})))
    return lines


def _kept(document: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a stored run with its optimizer on the device."""
    workload = document.get("workload", {})
    if not workload.get("offload_optimizer"):
        return dict(document)
    return {
        **document,
        "workload": {k: v for k, v in workload.items() if k != "offload_optimizer"},
    }


def _place(document: Mapping[str, Any]) -> tuple[str, str]:
    work, spread = work_of(document)
    return work, str(spread)


def _line(
    document: Mapping[str, Any], measured: Mapping[str, Any], kept: Mapping[str, Any]
) -> dict[str, str]:
    plan = parse_plan(document)
    spread, workload = plan.parallelism, plan.workload
    assert isinstance(workload, TrainingWorkload)
    host_bytes = sum(row.size_bytes for row in host_ledger(plan.model, workload, spread))
    step = host_step(plan.model, workload, spread.world_size, plan.hardware)
    return {
        "plan": work_title(plan).removesuffix(", offload optimizer True"),
        "stage": str(spread.zero_stage),
        "N": f"{spread.world_size:,}",
        "here": _gib(measured["allocated_bytes"]),
        "kept": _gib(kept["allocated_bytes"]) if kept else "-",
        "host": _gib(measured["state"]["host_bytes"]),
        "predicted": _gib(host_bytes),
        "step ms": f"{1000 * measured['step_time_s']:.1f}",
        "kept: step ms": f"{1000 * kept['step_time_s']:.1f}" if kept else "-",
        "adds ms": f"{1000 * float(step.time_s):.1f}",
    }


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB_BYTES:.2f}"
