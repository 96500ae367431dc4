"""Record a matrix of job specs on this machine's GPU: `python -m runners.record MATRIX OUT`.

Each spec runs in fresh processes. The next processes already import and build their models while
one runs; the GPU lock lets one at a time through. A row is appended as soon as its result is
there, and specs whose row is in OUT already are passed over, so a cut-off recording goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.checks import canonical_json
from planner.records import Kind, RecordedRow, Role, row_id
from planner.units import format_bytes
from runners.contract import RESULT_FILE, SPEC_FILE, JobResult, JobSpec, Outcome
from runners.launch import job_command, num_ranks
from runners.process_tree import TAG_VARIABLE, kill_run

_RECORDED_OUTCOMES = (Outcome.DONE, Outcome.OOM_DEVICE)
_PROCESSES_AHEAD = 2
_POLL_S = 0.1
_LOG_TAIL_LINES = 3
_MEMORY_COLUMNS = ("allocated_bytes", "reserved_bytes", "device_bytes")
_SHORT_NAMES = {
    "engine": "engine",
    "zero_stage": "stage",
    "world_size": "N",
    "sequence_length": "S",
    "micro_batch": "b",
    "grad_accumulation": "ga",
    "attention": "attn",
    "checkpointing": "ckpt",
    "optimizer": "opt",
    "precision": "prec",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a matrix: what to run and whether its row may count as evidence."""

    spec: JobSpec
    role: Role

    @property
    def key(self) -> str:
        """The spec's canonical JSON, which tells whether it has been recorded."""
        return canonical_json("spec", self.spec.to_dict())

    @property
    def label(self) -> str:
        """A short description for the table."""
        if self.spec.calibration is not None:
            return f"calibrate {self.spec.world}"
        if self.spec.plan is None:
            spec = self.spec
            asked = spec.attention or spec.decode or spec.serve or spec.quality or {}
            return " ".join(f"{k}={v}" for k, v in asked.items() if k != "trace")
        plan = self.spec.plan
        values = {**plan["workload"], **plan["parallelism"]}
        shown = [f"{_SHORT_NAMES[k]}={v}" for k, v in sorted(values.items()) if k in _SHORT_NAMES]
        return " ".join([plan["model"].get("preset", "custom"), *shown])


def read_matrix(path: Path) -> list[Entry]:
    """Read {"schema": 1, "defaults": {kind: spec}, "runs": [spec, ...]}.

    A run's spec is laid over its kind's defaults, mapping by mapping; its "role" is evidence
    unless it says holdout or calibration. Raises ValueError naming the run at fault.
    """
    data = json.loads(path.read_text())
    if data.get("schema") != 1:
        raise ValueError(f"{path.name}: schema is {data.get('schema')!r}; this version reads 1")
    entries = []
    for number, run in enumerate(data["runs"], start=1):
        merged = _merge(data["defaults"].get(run.get("kind"), {}), run)
        role = Role(merged.pop("role", Role.EVIDENCE))
        try:
            spec = JobSpec.from_dict({"schema": 1, **merged})
            num_ranks(spec)
            entries.append(Entry(spec, role))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}: run {number}: {error}") from error
    return entries


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = _merge(below, value)
        merged[key] = value
    return merged


class _Run:
    """A started process of one entry."""

    def __init__(self, entry: Entry, directory: Path) -> None:
        self.entry = entry
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / SPEC_FILE).write_text(json.dumps(entry.spec.to_dict()))
        self._log = (directory / "log").open("w")
        self._tag = f"record-{os.getpid()}-{directory.name}"
        self._process = subprocess.Popen(
            job_command(entry.spec, directory),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, TAG_VARIABLE: self._tag},
        )
        self._held_since: float | None = None

    def is_over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def is_late(self) -> bool:
        """Whether it has held the device for longer than its deadline."""
        if self._held_since is None and self._holds_device():
            self._held_since = time.monotonic()
        held_since = self._held_since
        deadline_s = self.entry.spec.deadline_s
        return held_since is not None and time.monotonic() - held_since > deadline_s

    def stop(self) -> None:
        """End the process, its ranks (torchrun's do not die with it) and its record."""
        kill_run(self._tag, below=self._process.pid)
        self._process.wait()
        self._log.close()

    def result(self) -> JobResult | None:
        """Return what the process left, or None."""
        path = self.directory / RESULT_FILE
        return JobResult.from_dict(json.loads(path.read_text())) if path.exists() else None

    def log_tail(self) -> str:
        """Return the last lines of the process's output."""
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def last_event(self) -> str:
        """Return what rank 0 was at, as it told."""
        events = self.directory / "events-rank0.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        return lines[-1] if lines else "its start"

    def _holds_device(self) -> bool:
        events = self.directory / "events-rank0.jsonl"
        return events.exists() and '"device_held"' in events.read_text()


def make_row(entry: Entry, result: JobResult, moment: datetime) -> dict[str, Any]:
    """Return the recorded row of a result; an out-of-memory error is part of what was measured."""
    measured = dict(result.measured)
    if result.error is not None:
        measured["error"] = result.error
    spec = entry.spec.to_dict()
    row = RecordedRow(
        id=row_id(spec, measured, result.environment),
        kind=Kind(entry.spec.kind),
        recorded_at=moment.replace(microsecond=0),
        role=entry.role,
        spec=spec,
        outcome=result.outcome,
        measured=measured,
        environment=result.environment,
    )
    return row.to_dict()


class Recorder:
    """Runs entries until they are done or the time is up, and appends their rows to a file."""

    def __init__(
        self, out: Path, directory: Path, budget_s: float, ahead: int = _PROCESSES_AHEAD
    ) -> None:
        self._out, self._directory, self._ahead = out, directory, ahead
        self._ends_at = time.monotonic() + budget_s
        self._active: list[_Run] = []
        self.counts: dict[str, int] = {}

    def run(self, entries: list[Entry]) -> None:
        """Run `entries` in order; what the budget leaves no time for is counted as not_run."""
        waiting = list(enumerate(entries))
        while (waiting or self._active) and time.monotonic() < self._ends_at:
            while waiting and len(self._active) <= self._ahead:
                index, entry = waiting.pop(0)
                self._active.append(_Run(entry, self._directory / f"run-{index:03}"))
            for run in [r for r in self._active if r.is_over() or r.is_late()]:
                self._active.remove(run)
                self._finish(run)
            time.sleep(_POLL_S)
        for run in self._active:
            print(f"stopped    {run.entry.label}, at {run.last_event()}", flush=True)
            run.stop()
        self._count("not_run", len(waiting) + len(self._active))

    def _finish(self, run: _Run) -> None:
        was_late = not run.is_over()
        run.stop()
        result = run.result()
        outcome = Outcome.TIMED_OUT if was_late else Outcome.CRASHED
        if result is not None:
            outcome = result.outcome
        self._count(outcome)
        if result is not None and outcome in _RECORDED_OUTCOMES:
            row = make_row(run.entry, result, datetime.now(UTC))
            with self._out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(_table_line(run.entry, outcome, result), flush=True)
        if outcome not in _RECORDED_OUTCOMES:
            reason = run.log_tail() if result is None or not result.error else result.error
            print(f"    {reason}", flush=True)

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number


def _table_line(entry: Entry, outcome: str, result: JobResult | None) -> str:
    measured = {} if result is None else result.measured
    cells = [format_bytes(measured[k]) if measured.get(k) else "-" for k in _MEMORY_COLUMNS]
    time_s = measured.get("step_time_s")
    cells.append(f"{time_s * 1000:.1f} ms" if time_s else "-")
    return f"{outcome:<10} {' '.join(f'{cell:>11}' for cell in cells)}  {entry.label}"


def recorded_keys(path: Path) -> set[str]:
    """Return the canonical specs of the rows in `path`; none where there is no such file."""
    if not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    # As this version writes it: rows of before may lack a field that has a default now.
    specs = [JobSpec.from_dict(row["spec"]).to_dict() for row in rows]
    return {canonical_json("spec", spec) for spec in specs}


def main() -> int:
    """Record what the command line names; 0 when every spec has its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("matrix", type=Path, help="matrix of job specs (JSON)")
    parser.add_argument("out", type=Path, help="file of recorded rows to append to (JSON lines)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument(
        "--ahead",
        type=int,
        choices=range(17),
        default=_PROCESSES_AHEAD,
        help="processes that import and build while one runs; more take the host from it",
    )
    arguments = parser.parse_args()
    # A job never reaches the network: every model is built from the config in its spec.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    done = recorded_keys(arguments.out)
    try:
        entries = [entry for entry in read_matrix(arguments.matrix) if entry.key not in done]
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    with tempfile.TemporaryDirectory(prefix="peakmark-record-") as directory:
        recorder = Recorder(arguments.out, Path(directory), arguments.budget_s, arguments.ahead)
        recorder.run(entries)
    print(", ".join(f"{name}: {number}" for name, number in recorder.counts.items() if number))
    return 0 if set(recorder.counts) <= {*_RECORDED_OUTCOMES, "not_run"} else 1


if __name__ == "__main__":
    sys.exit(main())
