"""What every job does around its measurement: spec in, events and result out, errors classified."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from planner.errors import PlanError
from planner.units import GIB_BYTES, KIB_BYTES, MIB_BYTES
from runners.contract import (
    RESULT_FILE,
    JobKind,
    JobResult,
    JobSpec,
    Outcome,
    World,
    write_json_atomically,
)
from runners.environment import capture_environment, device_baseline_bytes, visible_gpu_name
from runners.events import EventLog
from runners.jobs.gpu_lock import take_gpus
from runners.worlds import Launch, choose_device

_TRACEBACK_LINES = 12
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB|bytes)")
_UNIT_BYTES = {"bytes": 1, "KiB": KIB_BYTES, "MiB": MIB_BYTES, "GiB": GIB_BYTES}
_SETTLE_INTERVAL_S, _STABLE_READINGS, _MAX_SETTLE_READINGS = 0.2, 3, 50
_ALLOCATOR, _OLDER_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments"
_HOST_OOM_TEXT = "can't allocate memory"


@dataclass(slots=True)
class JobSession:
    """A job under way. `measured` fills as the job runs, so that a failure keeps what was seen."""

    spec: JobSpec
    launch: Launch
    device: torch.device
    events: EventLog
    measured: dict[str, Any] = field(default_factory=dict)

    def take_device(self) -> None:
        """Take the run's GPUs for good and note what was in use on this process's before."""
        if self.device.type != "cuda":
            return
        index = self.device.index or 0
        names: list[str] = []
        if self.launch.local_rank == 0:
            is_nccl = self.spec.world is World.NCCL
            indices = range(torch.cuda.device_count()) if is_nccl else [index]
            names = [visible_gpu_name(i) for i in indices]
        self.events.emit("waiting_for_device")
        take_gpus(names)
        self.events.emit("device_held")
        self.measured["device_baseline_bytes"] = _settled_baseline_bytes(index)


def _settled_baseline_bytes(index: int) -> int | None:
    """What is in use on the GPU once the run before has left it: the driver frees it late."""
    lowest = device_baseline_bytes(index)
    if lowest is None:
        return None
    stable_readings = 0
    for _ in range(_MAX_SETTLE_READINGS):
        time.sleep(_SETTLE_INTERVAL_S)
        reading = device_baseline_bytes(index) or 0
        stable_readings = stable_readings + 1 if reading >= lowest else 0
        lowest = min(lowest, reading)
        if stable_readings == _STABLE_READINGS:
            break
    return lowest


def run_job(kind: JobKind, measure: Callable[[JobSession], None]) -> int:
    """Run `measure` as the job that the command line names; return the process's exit code.

    Out of memory is a result (exit 0), except among several processes, where the others are
    still waiting for this one and only its failure ends them.
    """
    spec_path, out_dir = Path(sys.argv[1]), Path(sys.argv[2])
    spec = JobSpec.from_dict(json.loads(spec_path.read_text()))
    out_dir.mkdir(parents=True, exist_ok=True)
    launch = Launch.from_environment()
    events = EventLog(out_dir, launch.rank)
    events.emit("start", kind=kind)
    session: JobSession | None = None
    os.environ |= allocator_variables(spec, os.environ)
    try:
        device = choose_device(spec.world, launch, spec.device)
        session = JobSession(spec=spec, launch=launch, device=device, events=events)
        measure(session)
        result = JobResult(
            outcome=Outcome.DONE,
            measured=session.measured,
            environment=capture_environment(device),
        )
    except Exception as error:
        result = _describe_failure(error, session)
    events.emit("end", outcome=result.outcome)
    _leave_result(out_dir, result, launch)
    if result.outcome is Outcome.DONE:
        return 0
    return 0 if result.outcome is Outcome.OOM_DEVICE and launch.process_count == 1 else 1


def allocator_variables(spec: JobSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a job the allocator of its plan, with what is set already.

    Torch reads them when its allocator is first used, so they must be set before CUDA starts.
    """
    workload = (spec.plan or {}).get("workload", {})
    if not workload.get("expandable_segments"):
        return {}
    given = environment.get(_ALLOCATOR) or environment.get(_OLDER_ALLOCATOR) or ""
    kept = [part for part in given.split(",") if part and not part.startswith(_EXPANDABLE)]
    settings = ",".join([*kept, f"{_EXPANDABLE}:True"])
    # The older name is read by some parts before the newer one.
    names = [_ALLOCATOR, *([_OLDER_ALLOCATOR] if _OLDER_ALLOCATOR in environment else [])]
    return dict.fromkeys(names, settings)


def _leave_result(out_dir: Path, result: JobResult, launch: Launch) -> None:
    """Write the result: rank 0's, or the first failure of another rank."""
    path = out_dir / RESULT_FILE
    owns_the_file = launch.rank == 0 if result.outcome is Outcome.DONE else not path.exists()
    if owns_the_file:
        write_json_atomically(path, result.to_dict())


def _describe_failure(error: Exception, session: JobSession | None) -> JobResult:
    measured = {} if session is None else session.measured
    description: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    environment: dict[str, Any] = {}
    outcome = Outcome.FAILED
    if isinstance(error, torch.OutOfMemoryError) and session is not None:
        outcome = Outcome.OOM_DEVICE
        description.update(describe_device_oom(str(error), session.device))
        environment = capture_environment(session.device)
    elif isinstance(error, RuntimeError) and _HOST_OOM_TEXT in str(error):
        outcome = Outcome.OOM_HOST
    elif not isinstance(error, PlanError):
        lines = "".join(traceback.format_exception(error)).splitlines()
        description["traceback"] = lines[-_TRACEBACK_LINES:]
    return JobResult(outcome=outcome, measured=measured, environment=environment, error=description)


def describe_device_oom(message: str, device: torch.device) -> dict[str, int | None]:
    """Return the allocator's numbers behind an out-of-memory error, in bytes.

    requested_bytes is read from the message, which rounds it; the rest is asked of the device.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "requested_bytes": parse_requested_bytes(message),
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
    }


def parse_requested_bytes(message: str) -> int | None:
    """Return the size that an allocator's message says was asked for, to its two decimals."""
    match = _REQUESTED.search(message)
    return None if match is None else round(float(match[1]) * _UNIT_BYTES[match[2]])
