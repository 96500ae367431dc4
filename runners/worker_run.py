"""Executes one claimed run: starts its supervisor, keeps its lease, stores how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM

from db import queue
from db.database import Database
from db.measurements import StoredResult, store_result
from db.problems import DatabaseProblem
from db.queue import HeldRun, Lease, StaleLease, WorkerIdentity
from db.types import RunState
from planner.attached import attached_gpus
from planner.plan import parse_plan
from runners.contract import SPEC_FILE, JobSpec, Outcome, World, write_json_atomically
from runners.launch import job_environment
from runners.outcome import SUPERVISOR_LOG, Classified, Ending, StoppedBy, classify, read_ending
from runners.process_tree import ProcessId, identify, kill_run
from runners.supervisor import LAUNCH_FILE, Launch
from runners.worker_gpus import choose_gpus

log = logging.getLogger("peakmark.worker")

HEARTBEAT_S = queue.LEASE_MS / 3 / 1000
# How long a supervisor may take beyond its own limits before it is killed itself.
SUPERVISOR_MARGIN_S = 20.0
MAX_DEADLINE_S = 7 * 24 * 3600.0
_STORE_RETRY_S = 2.0

Command = Callable[[JobSpec, Path], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What a worker brings to each of its runs; `stopping` says that it has been told to end."""

    database: Database
    identity: WorkerIdentity
    command: Command
    stopping: Callable[[], bool]
    poll_s: float
    grace_s: float

    def run_directory(self, run_id: str) -> Path:
        """Return the folder that holds a run's spec, logs, events and result."""
        return self.database.data_directory / "runs" / run_id


def execute_run(place: Workplace, held: HeldRun) -> None:
    """Run one claimed run to its end and store the end; nothing of it is left running."""
    run_id = held.lease.run_id
    try:
        spec = _read_spec(held)
        gpu_uuids = _reserve_gpus(place, held.lease, spec)
        execution = RunExecution(place, held.lease, spec, gpu_uuids)
    except (ValueError, TypeError, KeyError) as error:
        store(place, held.lease, _failed(f"the job cannot be started: {error}"))
        return
    except OSError as error:
        why = f"the folder of the run cannot be written: {error.strerror}"
        store(place, held.lease, _failed(why))
        return
    log.info("run %s: %s in world %s", run_id, spec.kind, spec.world)
    ended = execution.follow()
    if ended is None:
        log.warning("run %s: the lease was lost, nothing was stored", run_id)
        return
    store(place, held.lease, ended)


def _read_spec(held: HeldRun) -> JobSpec:
    """Return the job to run; raises ValueError (PlanError for its plan) with one sentence."""
    spec = JobSpec.from_dict(held.spec)
    if not isinstance(spec.deadline_s, int | float) or not 0 < spec.deadline_s <= MAX_DEADLINE_S:
        raise ValueError(f"deadline_s is {spec.deadline_s!r}: it must be from 0 to 604800 s")
    if spec.plan is not None:
        parse_plan(spec.plan)
    return spec


def _reserve_gpus(place: Workplace, lease: Lease, spec: JobSpec) -> tuple[str, ...] | None:
    """Hold the GPUs of a run; None where NVML cannot tell, so that the job must find its own."""
    if spec.world is World.CPU:
        return ()
    attached = attached_gpus()
    if not attached.gpus:
        return None
    chosen = choose_gpus(spec, attached.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    holder = queue.reserve_gpus(place.database, lease, chosen)
    if holder is not None:
        raise ValueError(f"its GPU is held by run {holder}")
    # A device that the spec names by number means that number among all we see.
    return None if spec.device is not None else chosen


class RunExecution:
    """A run while its supervisor lives."""

    def __init__(
        self, place: Workplace, lease: Lease, spec: JobSpec, gpu_uuids: tuple[str, ...] | None
    ) -> None:
        self._place = place
        self._lease = lease
        self._directory = place.run_directory(lease.run_id)
        self._asked: StoppedBy | None = None
        self._stale = False
        self._next_beat = time.monotonic()
        self._give_up = time.monotonic() + spec.deadline_s + place.grace_s + SUPERVISOR_MARGIN_S
        self._write_files(spec)
        self._process = self._start(job_environment(lease.run_id, gpu_uuids))

    def _write_files(self, spec: JobSpec) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        identity = self._place.identity
        launch = Launch(
            run_id=self._lease.run_id,
            command=self._place.command(spec, self._directory),
            deadline_s=spec.deadline_s,
            grace_s=self._place.grace_s,
            worker=ProcessId(identity.pid, identity.pid_start_ticks),
        )
        write_json_atomically(self._directory / SPEC_FILE, spec.to_dict())
        write_json_atomically(self._directory / LAUNCH_FILE, launch.to_dict())

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._directory / SUPERVISOR_LOG).open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "runners.supervisor", str(self._directory)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def follow(self) -> Classified | None:
        """Wait for the end, keeping the lease and obeying requests; None when the lease is lost."""
        with contextlib.suppress(StaleLease, DatabaseProblem):
            self._record_process()
        while self._process.poll() is None:
            self._look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._place.poll_s)
        if not kill_run(self._lease.run_id):
            log.error("run %s: a process of it cannot be killed", self._lease.run_id)
        if self._stale:
            return None
        ending = read_ending(self._directory)
        if ending is None and self._asked is not None:
            ending = Ending(exit_code=None, stopped_by=self._asked)
        return classify(ending, self._directory)

    def _record_process(self) -> None:
        supervisor = identify(self._process.pid)
        queue.record_process(
            self._place.database,
            self._lease,
            pid=self._process.pid,
            pid_start_ticks=supervisor.start_ticks if supervisor else 0,
            run_directory=str(self._directory),
        )

    def _look(self) -> None:
        try:
            pulse = self._beat_or_read()
        except DatabaseProblem as problem:
            # The lease outlives a few missed beats; the job need not suffer from a busy database.
            log.warning("run %s: %s", self._lease.run_id, problem)
        else:
            self._stale = pulse is None
            if pulse is None:
                self._ask(StoppedBy.WORKER_STOPPED)
            elif pulse.cancel_requested:
                self._ask(StoppedBy.CANCEL)
        if self._place.stopping():
            self._ask(StoppedBy.WORKER_STOPPED)
        if time.monotonic() > self._give_up:
            self._asked = self._asked or StoppedBy.DEADLINE
            self._process.kill()

    def _beat_or_read(self) -> queue.Pulse | None:
        if time.monotonic() < self._next_beat:
            return queue.read_pulse(self._place.database, self._lease)
        self._next_beat = time.monotonic() + HEARTBEAT_S
        queue.beat_worker(self._place.database, self._place.identity)
        return queue.heartbeat(self._place.database, self._lease)

    def _ask(self, reason: StoppedBy) -> None:
        if self._asked is not None:
            return
        self._asked = reason
        self._give_up = time.monotonic() + self._place.grace_s + SUPERVISOR_MARGIN_S
        self._process.send_signal(SIGINT if reason is StoppedBy.CANCEL else SIGTERM)


def _failed(why: str) -> Classified:
    return Classified(outcome=Outcome.FAILED, why=why)


def store(place: Workplace, lease: Lease, ended: Classified) -> None:
    """Store how a run ended; waits while the database is locked or full, so that nothing is lost.

    A worker told to stop leaves the result in its folder, where the next worker finds it.
    """
    while True:
        try:
            _store_once(place, lease, ended)
        except StaleLease:
            log.warning("run %s: the lease was lost, nothing was stored", lease.run_id)
        except DatabaseProblem as problem:
            if not problem.passing or place.stopping():
                raise
            log.warning("run %s: not stored yet: %s", lease.run_id, problem)
            time.sleep(_STORE_RETRY_S)
            continue
        return


def _store_once(place: Workplace, lease: Lease, ended: Classified) -> None:
    state = RunState(ended.outcome.value)
    ending = read_ending(place.run_directory(lease.run_id))
    exit_code = ending.exit_code if ending else None
    if ended.result is None:
        why = ended.why or str(ended.outcome)
        queue.finish_run(place.database, lease, state, why=why, exit_code=exit_code)
    else:
        result = StoredResult(
            state=state,
            measured=ended.result.measured,
            environment=ended.result.environment,
            error=ended.result.error,
            why=ended.why,
            exit_code=exit_code,
        )
        store_result(place.database, lease, result)
    log.info("run %s: %s%s", lease.run_id, state, f" ({ended.why})" if ended.why else "")


def recover_runs(place: Workplace) -> None:
    """End what earlier workers of this host left behind: keep finished results, lose the rest."""
    for held in queue.running_on(place.database, place.identity.host):
        run_id = held.lease.run_id
        kill_run(run_id)
        directory = place.run_directory(run_id)
        gone = StoppedBy.CANCEL if held.cancel_requested else StoppedBy.WORKER_GONE
        ending = read_ending(directory) or Ending(exit_code=None, stopped_by=gone)
        store(place, held.lease, classify(ending, directory))
