"""The job `calibrate`: how fast this machine's GPUs compute, move bytes, start work and talk.

python -m runners.jobs.calibrate SPEC.json OUT_DIR      (or under torchrun, for collectives)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch

from planner.calibration import Curve
from planner.errors import PlanError
from runners.contract import JobKind
from runners.jobs.calibrate_case import DTYPES, Case
from runners.jobs.calibrate_cases import collective_sizes, local_cases
from runners.jobs.calibrate_host import measure_host
from runners.jobs.harness import JobSession, run_job
from runners.jobs.stopwatch import Stopwatch, Work
from runners.launch import MAX_RANKS
from runners.measure import device_used_bytes, host_peak_bytes
from runners.worlds import RunningWorld, open_world
from runners.zero.collectives import Collectives

_COLLECTIVE_REPETITIONS = 20
_FIELDS = {"world_size", "budget_s"}


def parse_calibration(given: Mapping[str, Any] | None) -> tuple[int, float]:
    """Read a spec's `calibration`: ranks, and the seconds after which no case is begun.

    Raises PlanError naming the field at fault.
    """
    values = dict(given or {})
    if set(values) != _FIELDS:
        allowed = f"exactly the fields {', '.join(sorted(_FIELDS))}"
        raise PlanError("calibration", ", ".join(sorted(values)), allowed)
    ranks, budget_s = values["world_size"], values["budget_s"]
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise PlanError("calibration.world_size", ranks, f"an integer from 1 to {MAX_RANKS}")
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or budget_s <= 0:
        raise PlanError("calibration.budget_s", budget_s, "a positive number of seconds")
    return ranks, float(budget_s)


def measure_calibration(session: JobSession) -> None:
    """Measure collectives over all ranks, then on rank 0 the rest; fills `session.measured`."""
    spec, measured = session.spec, session.measured
    ranks, budget_s = parse_calibration(spec.calibration)
    session.take_device()
    torch.manual_seed(spec.seed)
    start_s = time.monotonic()
    curves: list[dict[str, Any]] = []
    measured |= {"curves": curves, "left_out": []}
    with open_world(
        spec.world,
        world_size=ranks,
        rank=spec.rank,
        launch=session.launch,
        device=session.device,
    ) as world:
        watch = Stopwatch(session.device)
        if world.launch.process_count > 1:
            curves += [curve.to_dict() for curve in _collectives(session, world, watch)]
        if world.launch.rank == 0:
            _measure_locally(session, watch, start_s + budget_s)
        measured["duration_s"] = time.monotonic() - start_s
        measured["host_bytes"] = host_peak_bytes()
        if session.device.type == "cuda":
            measured["device_bytes"] = device_used_bytes(session.device)
        # The others wait here for rank 0.
        world.gather({"rank": world.launch.rank})
    if session.launch.rank == 0:
        measured["host"] = []
        for row in measure_host(session.device, spec.seed, start_s + budget_s):
            session.events.phase("host", **{k: row[k] for k in ("family", "engine", "stage")})
            measured["host"].append(row)
        measured["duration_s"] = time.monotonic() - start_s


def _measure_locally(session: JobSession, watch: Stopwatch, ends_at: float) -> None:
    cases, measured = local_cases(session.device), session.measured
    for index, case in enumerate(cases):
        if time.monotonic() > ends_at:
            measured["left_out"] = [f"{c.operation} {list(c.shape)}" for c in cases[index:]]
            return
        session.events.phase(case.group, index=index, of=len(cases), operation=case.operation)
        measured["curves"].append(_point(case, watch, session.device).to_dict())


def _point(case: Case, watch: Stopwatch, device: torch.device) -> Curve:
    times_s = case.times_s(watch, device)
    return Curve(
        operation=case.measured_operation,
        shape=case.shape,
        dtype=case.dtype,
        bytes=case.bytes,
        flops=case.flops,
        time_s=median(times_s),
        n=len(times_s),
    )


def _collectives(session: JobSession, world: RunningWorld, watch: Stopwatch) -> Iterator[Curve]:
    """Every rank's median of each collective and size; the slowest rank's is the point."""
    ranks = world.launch.process_count
    for size_bytes in collective_sizes(session.device.type == "cuda"):
        element_bytes = DTYPES["bf16"].itemsize
        elements = size_bytes // element_bytes // ranks * ranks
        for operation in ("all_reduce", "all_gather", "reduce_scatter"):
            session.events.phase("collectives", operation=operation, bytes=size_bytes)
            work = _collective(world.collectives, operation, elements, session.device)
            times_s = watch.device_times_s(work, cold=False, number=_COLLECTIVE_REPETITIONS)
            medians = world.gather({"median_s": median(times_s)})
            yield Curve(
                operation=operation,
                shape=(elements, ranks),
                dtype="bf16",
                bytes=elements * element_bytes,
                flops=0.0,
                time_s=max(one["median_s"] for one in medians),
                n=len(times_s),
            )


def _collective(
    collectives: Collectives, operation: str, elements: int, device: torch.device
) -> Work:
    full = torch.randn(elements, device=device, dtype=DTYPES["bf16"])
    shard = torch.empty(elements // collectives.world_size, device=device, dtype=DTYPES["bf16"])
    match operation:
        case "all_reduce":
            return lambda: collectives.all_reduce(full)
        case "all_gather":
            return lambda: collectives.all_gather(full, shard)
    return lambda: collectives.reduce_scatter(shard, full)


if __name__ == "__main__":
    sys.exit(run_job(JobKind.CALIBRATE, measure_calibration))
