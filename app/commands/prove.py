"""`peakmark prove`: run a plan for real and compare with its prediction."""

from __future__ import annotations

import json as json_module
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.comparison import comparison_rows, print_comparison
from app.commands.folders import absolute_folder, existing_folder
from app.commands.limit import prove_largest
from app.commands.options import SIZE_OPTIONS, TARGET_OPTIONS, plan_from, with_options
from app.commands.output import (
    InputError,
    JsonFlag,
    print_json,
    print_line,
)
from app.commands.queued import say_outcome
from app.commands.store import opened_database
from app.saved_words import saved_lines

if TYPE_CHECKING:
    from db.engine import Database
    from db.views import RunDetail
    from planner.plan import Plan

POLL_S = 0.3
CANCEL_WAIT_S = 30.0
MAX_WORKER_STARTS = 3
CONFIRMED = frozenset({"done", "oom_device"})


@with_options(TARGET_OPTIONS, SIZE_OPTIONS)
def prove_command(
    *,
    chosen: Mapping[str, Any],
    world: Annotated[
        str | None, typer.Option(help="nccl, shared, solo or cpu; the best there is if left out.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds until the run is stopped.")
    ] = 1800.0,
    save_to: Annotated[
        Path | None, typer.Option(help="Folder to save the trained step to, as step-NNNNNNNN.")
    ] = None,
    load_from: Annotated[
        Path | None, typer.Option(help="Folder of saved steps (or one of them) to go on from.")
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            help="Prove by short runs how far the plan goes: micro_batch, sequence_length or num_layers."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Run a training plan on this machine and compare what it took with the prediction.

    Exit code 0 when the run is done or ran out of GPU memory (a result too), else 1.
    """
    plan = plan_from(chosen)
    if largest is not None:
        _check_alone(save_to, load_from)
        prove_largest(plan, largest, world, deadline, as_json=json)
        return
    with opened_database() as database:
        places = {
            "save_to": absolute_folder("save-to", save_to),
            "load_from": existing_folder("load-from", load_from),
        }
        run_id = submit(database, plan, world, deadline, **places)
        detail = Watch(database=database, run_id=run_id, quiet=json).until_finished()
    report(detail, as_json=json)
    if detail.summary.state.value not in CONFIRMED:
        raise typer.Exit(1)


def _check_alone(save_to: Path | None, load_from: Path | None) -> None:
    """Raise InputError for folders beside a search, whose short runs save and load nothing."""
    for name, folder in (("save-to", save_to), ("load-from", load_from)):
        if folder is not None:
            sentence = (
                f"--{name} is given beside --largest, whose short runs save and load nothing."
            )
            raise InputError(name, str(folder), "without --largest", sentence)


def submit(
    database: Database, plan: Plan, world: str | None, deadline_s: float, **places: str | None
) -> str:
    """Queue the run and return its id; raises InputError when this machine cannot run it.

    `places` are `save_to` and `load_from` of the job spec.
    """
    from app.proof import job_spec
    from db.repository import create_run
    from planner.predict import predict

    prediction = predict(plan).to_dict()
    place = require_world(plan, prediction, world)
    return create_run(
        database,
        job_spec(plan, place, deadline_s=deadline_s, **places),
        plan.to_dict(),
        prediction,
        idempotency_key=uuid.uuid4().hex,
        who="command line",
    )


def require_world(plan: Plan, prediction: dict[str, Any], world: str | None) -> str:
    """Return the world to run in; raises InputError when it does not exist or cannot hold it.

    Raises PlanError for a plan that no run can prove.
    """
    from app.proof import (
        WORLDS,
        check_provable,
        choose_world,
        gpu_only,
        host_memory_free_bytes,
        host_memory_needed_bytes,
    )
    from planner.attached import attached_gpus
    from planner.units import format_bytes

    check_provable(plan)
    num_gpus = len(attached_gpus().gpus)
    chosen = world or choose_world(plan, num_gpus)
    if chosen not in WORLDS:
        allowed = ", ".join(WORLDS)
        raise InputError(
            "world", world, allowed, f"--world is {world!r}: it must be one of {allowed}."
        )
    if chosen != "cpu" and num_gpus == 0:
        sentence = f"The world {chosen} needs a GPU and none is attached: use --world cpu."
        raise InputError("world", chosen, "cpu", sentence)
    if chosen == "cpu":
        problem = gpu_only(plan)
        if problem is not None:
            raise problem
        needed = host_memory_needed_bytes(prediction, plan.parallelism.world_size)
        free = host_memory_free_bytes()
        if needed > free:
            sentence = (
                f"On the CPU this plan needs about {format_bytes(needed)} and this machine can "
                f"give {format_bytes(free)}: choose a smaller model, sequence or --gpus."
            )
            raise InputError("world", chosen, "a plan that the host can hold", sentence)
    return chosen


@dataclass(kw_only=True)
class Watch:
    """Follows one run; starts a worker when there is none, cancels the run on Ctrl-C."""

    database: Database
    run_id: str
    quiet: bool
    worker: subprocess.Popen[bytes] | None = None
    interrupted: bool = False
    num_starts: int = 0

    def until_finished(self) -> RunDetail:
        """Wait for the end of the run and return it; Ctrl-C asks the run to stop."""
        # A flag instead of KeyboardInterrupt, which would cut a database read in two.
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            with self._status() as show:
                detail = self._wait(show)
        finally:
            signal.signal(signal.SIGINT, before)
        self._leave_worker()
        return detail

    def _on_interrupt(self, *_: object) -> None:
        self.interrupted = True

    def _wait(self, show: Callable[[str], None]) -> RunDetail:
        from app.commands.runs import require_run
        from db.repository import request_cancel

        give_up_at: float | None = None
        while True:
            detail = require_run(self.database, self.run_id)
            if detail.summary.finished:
                return detail
            if self.interrupted and give_up_at is None:
                request_cancel(self.database, self.run_id, who="command line")
                give_up_at = time.monotonic() + CANCEL_WAIT_S
                continue
            if give_up_at is not None and time.monotonic() > give_up_at:
                return detail
            self._ensure_worker(queued=detail.summary.state.value == "queued")
            show(progress_line(detail))
            time.sleep(POLL_S)

    def _ensure_worker(self, *, queued: bool) -> None:
        """Start a worker where none is alive: it takes a queued run, and stores a lost one as such.

        A worker that was started beside another ends at once, so the first failure is no reason.
        """
        from db.repository import request_cancel, worker_alive

        ended = self.worker is None or self.worker.poll() is not None
        if not ended or worker_alive(self.database):
            return
        if self.num_starts < MAX_WORKER_STARTS:
            self.worker = self._start_worker()
            self.num_starts += 1
        elif queued and self.worker is not None:
            code = self.worker.returncode
            request_cancel(self.database, self.run_id, who="command line")
            sentence = (
                f"The worker ended with exit code {code} before it took run {self.run_id}, which "
                f"is cancelled: {self._worker_log} says why."
            )
            raise InputError("worker", code, "a worker that runs", sentence)

    @property
    def _worker_log(self) -> Path:
        return self.database.data_directory / "worker.log"

    def _start_worker(self) -> subprocess.Popen[bytes]:
        with self._worker_log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "runners.worker", "--once"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Its own session: Ctrl-C asks the run to stop, it must not shoot the worker.
                start_new_session=True,
            )

    def _leave_worker(self) -> None:
        """Wait for our own worker to go; one with more runs in the queue goes on by itself."""
        if self.worker is not None:
            try:
                self.worker.wait(timeout=5)
            except subprocess.TimeoutExpired:
                return

    @contextmanager
    def _status(self) -> Iterator[Callable[[str], None]]:
        from rich.console import Console

        if self.quiet:
            yield lambda text: None
            return
        console = Console(stderr=True)
        with console.status(f"run {self.run_id}: queued") as status:
            yield status.update


def progress_line(detail: RunDetail) -> str:
    """Return the state of a run and, while it runs on this host, its last phase."""
    state = "cancelling" if detail.summary.cancelling else detail.summary.state.value
    line = f"run {detail.summary.id}: {state}"
    if detail.run_directory is None:
        return line
    try:
        events = (Path(detail.run_directory) / "events-rank0.jsonl").read_text().splitlines()
        last = json_module.loads(events[-1])
    except (OSError, ValueError, IndexError):
        # Not there yet, or its last line is still being written.
        return line
    place = f" {last['index'] + 1} of {last['of']}" if "of" in last else ""
    return f"{line}, {last.get('name') or last.get('event')}{place}"


def report(detail: RunDetail, *, as_json: bool) -> None:
    """Print how the run ended, and predicted against measured where there is a measurement."""
    state, world = detail.summary.state.value, detail.summary.world.value
    prediction, measured = detail.prediction or {}, detail.measured or {}
    if as_json:
        rows = comparison_rows(prediction, measured, world) if measured else []
        print_json({"schema": 1, **detail.to_dict(), "comparison": rows})
        return
    say_outcome(detail)
    if state == "oom_device":
        print_line(f"Predicted: {prediction['verdict']['sentence']}")
    elif measured:
        print_comparison(prediction, measured, world)
    for line in saved_lines(measured):
        print_line(line)
