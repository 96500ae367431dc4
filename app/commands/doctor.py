"""`peakmark doctor`: what this machine has, what is missing and what to do about it."""

from __future__ import annotations

import platform
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app.commands.output import JsonFlag, make_table, print_json, print_table, styled

if TYPE_CHECKING:
    from planner.attached import AttachedGpu

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
PACKAGES = ("torch", "triton", "transformers")
LOW_DISK_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the examination: state is ok, warn or fail; `advice` says what to do."""

    name: str
    state: str
    found: str
    advice: str = ""


def doctor_command(json: JsonFlag = False) -> None:
    """Examine Python, packages, GPUs, compiler, database, worker and disk.

    Exit code 1 when a line says fail.
    """
    findings = [finding for check in CHECKS for finding in check()]
    if json:
        print_json({"schema": 1, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(styled(f.state, STYLES[f.state]), f.name, f.found, f.advice) for f in findings]
        print_table(make_table(None, ("", "what", "found", "to do"), (), rows))
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


def check_python() -> list[Finding]:
    """The Python that runs this; packaging refuses one older than 3.11."""
    return [Finding(name="python", state="ok", found=platform.python_version())]


def check_packages() -> list[Finding]:
    """The packages that runs need, by their metadata: nothing is imported."""
    findings = []
    for package in PACKAGES:
        try:
            findings.append(Finding(name=package, state="ok", found=version(package)))
        except PackageNotFoundError:
            advice = "run `make run` again, or pip install -e ."
            findings.append(Finding(name=package, state="fail", found="missing", advice=advice))
    return findings


def check_gpus() -> list[Finding]:
    """The attached GPUs, by NVML."""
    from planner.attached import attached_gpus

    attached = attached_gpus()
    if not attached.gpus:
        advice = "runs use the CPU; predictions for any GPU work as they are"
        found = attached.reason or "none attached"
        return [Finding(name="gpu", state="warn", found=found, advice=advice)]
    return [gpu_finding(gpu) for gpu in attached.gpus]


def gpu_finding(gpu: AttachedGpu) -> Finding:
    """One attached GPU; a busy or throttled one makes measurements worth little."""
    from planner.units import format_bytes

    found = f"{gpu.name}, {format_bytes(gpu.total_bytes)}, driver {gpu.driver}"
    if gpu.compute_processes:
        advice = f"{gpu.compute_processes} processes use it: let them end before a proof"
        return Finding(name=f"gpu {gpu.index}", state="warn", found=found, advice=advice)
    if gpu.throttle_reasons:
        advice = f"throttled ({', '.join(gpu.throttle_reasons)}): times will be too long"
        return Finding(name=f"gpu {gpu.index}", state="warn", found=found, advice=advice)
    return Finding(name=f"gpu {gpu.index}", state="ok", found=found)


def check_compiler() -> list[Finding]:
    """What Triton compiles its launcher with: a C compiler and Python's headers."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler and header.exists():
        return [Finding(name="C compiler", state="ok", found=compiler)]
    missing = "Python.h" if compiler else "no compiler"
    advice = "for Triton kernels: apt-get install gcc libc6-dev python3-dev"
    return [Finding(name="C compiler", state="warn", found=missing, advice=advice)]


def check_database() -> list[Finding]:
    """The database opens, is migrated, and a worker serves its queue."""
    from app.commands.store import opened_database
    from db.problems import DatabaseProblem
    from db.repository import worker_alive

    try:
        with opened_database() as database:
            alive, name = worker_alive(database), database.name
    except DatabaseProblem as problem:
        return [Finding(name="database", state="fail", found="cannot be used", advice=str(problem))]
    advice = "start one with `peakmark worker`; `peakmark prove` starts its own"
    worker = (
        Finding(name="worker", state="ok", found="alive")
        if alive
        else Finding(name="worker", state="warn", found="none", advice=advice)
    )
    return [Finding(name="database", state="ok", found=name), worker]


def check_disk() -> list[Finding]:
    """Room for run directories and the database."""
    from planner.units import format_bytes

    free = shutil.disk_usage(Path.cwd()).free
    found = f"{format_bytes(free)} free"
    if free >= LOW_DISK_BYTES:
        return [Finding(name="disk", state="ok", found=found)]
    return [Finding(name="disk", state="warn", found=found, advice="free some space")]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_packages,
    check_gpus,
    check_compiler,
    check_database,
    check_disk,
)
