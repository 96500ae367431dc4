"""The job `limit`: the largest micro-batch, sequence or model that fits, by short runs of training steps.

python -m runners.jobs.limit SPEC.json OUT_DIR

Each run is a `train_step` of its own in new processes, so that nothing of one is left to the next. This
process holds no GPU and never imports torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from planner.errors import PlanError
from planner.limit_run import (
    FITS,
    NOT_PLANNED,
    OUT_OF_MEMORY,
    LimitRun,
    Trial,
    limit_of,
    next_value,
    parse_limit,
)
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.reach import plan_reaching
from planner.workload import field_words
from runners.contract import (
    RESULT_FILE,
    SPEC_FILE,
    JobKind,
    JobResult,
    JobSpec,
    Outcome,
    write_json_atomically,
)
from runners.events import EventLog
from runners.launch import job_command
from runners.outcome import STDERR_FILE, STDOUT_FILE, Classified, Ending, classify

TRIALS = "trials"
# Two to grow the optimizer's state and the allocator's segments, and one that is measured.
_WARMUP_STEPS, _STEPS = 2, 1
_POLL_S = 0.1
# What is left of the deadline must hold another run like the longest so far.
_ROOM = 1.5

Command = Callable[[JobSpec, Path], list[str]]


@dataclass(slots=True, kw_only=True)
class LimitSearch:
    """The runs of one search, one after the other; SIGTERM ends the one under way and the search."""

    spec: JobSpec
    folder: Path
    command: Command
    events: EventLog
    trials: list[Trial] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    is_stopped: bool = False
    job: subprocess.Popen[bytes] | None = None

    def result(self) -> JobResult:
        """Search to the end and return what was found; what is asked wrongly is a failed result."""
        try:
            plan = parse_plan(self.spec.plan)
            run = parse_limit(self.spec.limit, plan, self.spec.world)
            problem = self._search(plan, run)
        except PlanError as error:
            return self._left(Outcome.FAILED, {}, str(error))
        measured = {"limit": limit_of(run, self.trials)}
        if self.is_stopped:
            return self._left(Outcome.CANCELLED, measured, None)
        if problem is not None:
            return self._left(problem.outcome, measured, problem.why)
        return self._left(Outcome.DONE, measured, None)

    def _left(self, outcome: Outcome, measured: dict[str, Any], why: str | None) -> JobResult:
        error = None if why is None else {"type": "LimitSearch", "message": why}
        return JobResult(
            outcome=outcome, measured=measured, environment=self.environment, error=error
        )

    def _search(self, plan: Plan, run: LimitRun) -> Classified | None:
        """Try values until the limit is known; return the end of a run that says nothing of memory."""
        until = time.monotonic() + self.spec.deadline_s
        while not self.is_stopped and (value := next_value(run, self.trials)) is not None:
            longest = max((one.seconds for one in self.trials), default=0.0)
            if time.monotonic() + _ROOM * longest > until:
                break
            number = len(self.trials)
            name = f"{field_words(run.name)} {value:,}, run"
            self.events.phase(name, index=number, of=run.max_runs)
            ended = self._try(plan, run, value)
            if ended is not None and not self.is_stopped:
                why = f"the run with {run.name} {value:,} ended as {ended.outcome}: {ended.why}"
                return replace(ended, why=why)
        return None

    def _try(self, plan: Plan, run: LimitRun, value: int) -> Classified | None:
        """Add a value's trial; return how its run ended where that says nothing of memory."""
        try:
            tried = plan_reaching(plan, run.name, value)
            predicted_bytes = int(predict(tried).memory["device_bytes"])
        except PlanError:
            self._add(value, NOT_PLANNED, None, None, 0.0)
            return None
        start_s = time.monotonic()
        ended = self._run(tried, value)
        if ended.outcome not in (FITS, OUT_OF_MEMORY):
            return ended
        measured = {} if ended.result is None else ended.result.measured
        self.environment = self.environment if ended.result is None else ended.result.environment
        seen = measured.get("device_bytes") if ended.outcome == FITS else None
        self._add(value, ended.outcome, predicted_bytes, seen, time.monotonic() - start_s)
        return None

    def _add(
        self, value: int, outcome: str, predicted: int | None, seen: int | None, seconds: float
    ) -> None:
        trial = Trial(
            value=value,
            outcome=str(outcome),
            predicted_bytes=predicted,
            device_bytes=seen,
            seconds=round(seconds, 2),
        )
        self.trials.append(trial)
        self.events.emit("trial", **trial.to_dict())

    def _run(self, plan: Plan, value: int) -> Classified:
        """Run a few steps of `plan` in processes of their own and return how that ended."""
        folder = self.folder / TRIALS / str(value)
        folder.mkdir(parents=True, exist_ok=True)
        spec = replace(
            self.spec,
            kind=JobKind.TRAIN_STEP,
            plan=plan.to_dict(),
            limit=None,
            warmup=_WARMUP_STEPS,
            steps=_STEPS,
        )
        write_json_atomically(folder / SPEC_FILE, spec.to_dict())
        command = self.command(spec, folder)
        with (folder / STDOUT_FILE).open("wb") as out, (folder / STDERR_FILE).open("wb") as err:
            self.job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            while self.job.poll() is None and not self.is_stopped:
                time.sleep(_POLL_S)
        return classify(Ending(exit_code=self.job.returncode), folder)

    def stop(self, *_: int | FrameType | None) -> None:
        """End the run under way, and the search; what it has shown so far is kept."""
        self.is_stopped = True
        if self.job is not None and self.job.poll() is None:
            self.job.terminate()


def run_limit(spec: Mapping[str, Any], folder: Path, command: Command = job_command) -> int:
    """Search as `spec` asks and leave the result in `folder`; return the process's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    events = EventLog(folder, 0)
    events.emit("start", kind=JobKind.LIMIT)
    read = JobSpec.from_dict(spec)
    search = LimitSearch(spec=read, folder=folder, command=command, events=events)
    signal.signal(signal.SIGTERM, search.stop)
    result = search.result()
    events.emit("end", outcome=result.outcome)
    write_json_atomically(folder / RESULT_FILE, result.to_dict())
    return 0 if result.outcome is Outcome.DONE else 1


if __name__ == "__main__":
    sys.exit(run_limit(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
