"""Runs beside the same plan with one choice of its workload made otherwise: what the choice costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from planner.memory.ideal import ideal_bytes
from planner.memory.offload import host_ledger
from planner.offload import host_step
from planner.plan import Plan, parse_plan
from planner.stage_points import work_title
from planner.units import GIB_BYTES
from planner.workload import TrainingWorkload
from planner.zero import training, work_of

CROWDED = "*"
Seen = tuple[Mapping[str, Any], Mapping[str, Any]]


class Beside(NamedTuple):
    """A run's plan as stored, what it measured, and what the newest run of the other choice did.

    `other` is empty where no run made it.
    """

    document: Mapping[str, Any]
    measured: Mapping[str, Any]
    other: Mapping[str, Any]


def runs_beside(
    seen: Iterable[Seen], field: str, value: object, instead: object, work: str | None = None
) -> list[Beside]:
    """Return each run among `seen`, (spec, measured) each, whose workload's `field` is `value`.

    Beside it stands the newest run in the same world whose `field` is `instead`, all else alike.
    `work` (see `planner.zero.work_of`) leaves out runs that would be of other work with `instead`.
    """
    steps = [
        (spec, measured)
        for spec, measured in seen
        if spec.get("plan") and measured.get("allocated_bytes")
    ]
    newest = {(*_place(spec["plan"]), spec["world"]): measured for spec, measured in steps}
    found = []
    for spec, measured in steps:
        document = spec["plan"]
        workload = document.get("workload", {})
        if workload.get(field) != value:
            continue
        place = _place({**document, "workload": {**workload, field: instead}})
        if work in (None, place[0]):
            other = newest.get((*place, spec["world"]), {})
            found.append(Beside(document, measured, other))
    return found


def _place(document: Mapping[str, Any]) -> tuple[str, str]:
    work, spread = work_of(document)
    return work, str(spread)


def offloaded_lines(seen: Iterable[Seen], work: str | None = None) -> list[dict[str, str]]:
    """Return a plain line of each run whose optimizer was in host memory; GiB and ms.

    "kept" is the same plan with the optimizer on the device, and "adds" what the host adds to a step,
    predicted (`planner.offload.host_step`). A step with `CROWDED` had a thread on every CPU.
    """
    return [_offloaded(one) for one in runs_beside(seen, "offload_optimizer", True, False, work)]


def _offloaded(one: Beside) -> dict[str, str]:
    plan = parse_plan(one.document)
    workload, spread = training(plan), plan.parallelism
    host_bytes = sum(row.size_bytes for row in host_ledger(plan.model, workload, spread))
    step = host_step(plan.model, workload, spread.world_size, plan.hardware)
    return {
        **_named(plan, workload),
        "here": _gib(one.measured, "allocated_bytes"),
        "kept": _gib(one.other, "allocated_bytes"),
        "host": _gib(one.measured["state"], "host_bytes"),
        "predicted": f"{host_bytes / GIB_BYTES:.2f}",
        "step ms": _ms(one.measured, "step_time_s") + ("" if _is_paced(one) else CROWDED),
        "kept: step ms": _ms(one.other, "step_time_s"),
        "adds ms": f"{1000 * float(step.time_s):.1f}",
    }


def _is_paced(one: Beside) -> bool:
    """Whether the run is from after the threads were halved: all since then say their host's pace."""
    return "host_pace" in one.measured


def kernel_lines(seen: Iterable[Seen], work: str | None = None) -> list[dict[str, str]]:
    """Return a plain line of each run that our AdamW kernel stepped, beside torch's; GiB and ms."""
    found = runs_beside(seen, "optimizer", "adamw_triton", "adamw_fused", work)
    return [_own_kernel(one) for one in found]


def _own_kernel(one: Beside) -> dict[str, str]:
    plan = parse_plan(one.document)
    workload = training(plan)
    least = ideal_bytes(plan.model, workload, plan.parallelism, plan.hardware)
    assert least is not None, "only plans of whole models run"
    return {
        **_named(plan, workload),
        "ideal": f"{least / GIB_BYTES:.2f}",
        "peak": _gib(one.measured, "allocated_bytes"),
        "torch's peak": _gib(one.other, "allocated_bytes"),
        "optimizer ms": _ms(one.measured, "optimizer_time_s"),
        "torch's ms": _ms(one.other, "optimizer_time_s"),
        "step ms": _ms(one.measured, "step_time_s"),
        "torch's step ms": _ms(one.other, "step_time_s"),
    }


def _named(plan: Plan, workload: TrainingWorkload) -> dict[str, str]:
    """The model and its workload in words, without what all lines share, and how it is spread."""
    title = work_title(plan).replace(f", {workload.optimizer}", "")
    return {
        "plan": title.removesuffix(", offload optimizer True"),
        "stage": str(plan.parallelism.zero_stage),
        "N": f"{plan.parallelism.world_size:,}",
    }


def _gib(figures: Mapping[str, Any], name: str) -> str:
    return f"{figures[name] / GIB_BYTES:.2f}" if figures.get(name) else "-"


def _ms(figures: Mapping[str, Any], name: str) -> str:
    return f"{1000 * figures[name]:.1f}" if figures.get(name) else "-"
