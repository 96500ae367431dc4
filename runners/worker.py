"""The worker: takes queued runs one by one and executes them. `python -m runners.worker [--once]`.

One worker per database and host; its GPU work is done by child processes, never by itself.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from db import queue
from db.database import Database
from db.engine import open_database
from db.problems import DatabaseProblem
from db.queue import WorkerIdentity
from runners.launch import job_command
from runners.process_tree import identify
from runners.supervisor import GRACE_S
from runners.worker_run import Command, Workplace, execute_run, recover_runs

log = logging.getLogger("peakmark.worker")

BEAT_S = 5.0


class WorkerProblem(Exception):  # noqa: N818 - told to a person
    """The worker cannot start; `str()` is one sentence."""


class Worker:
    """Claims runs and executes them until it is told to stop."""

    def __init__(
        self,
        database: Database,
        *,
        command: Command = job_command,
        poll_s: float = 1.0,
        grace_s: float = GRACE_S,
    ) -> None:
        self._stop = threading.Event()
        self._next_beat = 0.0
        self._place = Workplace(
            database=database,
            identity=_identify_self(),
            command=command,
            stopping=self._stop.is_set,
            poll_s=poll_s,
            grace_s=grace_s,
        )

    def stop(self) -> None:
        """Stop the current run, store its end and return from `run`."""
        self._stop.set()

    def run(self, *, once: bool) -> None:
        """Recover what an earlier worker left, then work; with `once`, until the queue is empty."""
        database, identity = self._place.database, self._place.identity
        with _only_worker(database):
            queue.beat_worker(database, identity)
            recover_runs(self._place)
            try:
                self._work(once)
            finally:
                queue.beat_worker(database, identity, stopped=True)

    def _work(self, once: bool) -> None:
        while not self._stop.is_set():
            try:
                self._beat()
                held = queue.claim_next_run(self._place.database, self._place.identity)
            except DatabaseProblem as problem:
                if not problem.passing:
                    raise
                log.warning("%s", problem)
                self._stop.wait(self._place.poll_s)
                continue
            if held is not None:
                execute_run(self._place, held)
            elif once:
                return
            else:
                self._stop.wait(self._place.poll_s)

    def _beat(self) -> None:
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_S
        queue.beat_worker(self._place.database, self._place.identity)
        for run_id in queue.lose_expired_elsewhere(self._place.database, self._place.identity):
            log.warning("run %s: lost, its worker on another host went silent", run_id)


def _identify_self() -> WorkerIdentity:
    me = identify(os.getpid())
    if me is None:
        raise WorkerProblem("The worker needs Linux: /proc does not describe this process.")
    host = socket.gethostname()
    return WorkerIdentity(host=host, pid=me.pid, pid_start_ticks=me.start_ticks)


@contextmanager
def _only_worker(database: Database) -> Iterator[None]:
    name = Path(str(database.url.database or "peakmark")).name
    path = database.data_directory / f"{name}.worker.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorkerProblem(
                f"Another worker already serves the database {database.name} on this host."
            ) from error
        yield


def serve(worker: Worker, *, once: bool) -> int:
    """Run a worker that SIGTERM and SIGINT stop; return the exit status of the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    try:
        worker.run(once=once)
    except (DatabaseProblem, WorkerProblem) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Start a worker on the database of this environment."""
    parser = argparse.ArgumentParser(prog="python -m runners.worker", description=__doc__)
    parser.add_argument("--once", action="store_true", help="run what is queued, then end")
    parser.add_argument("--poll-s", type=float, default=1.0, help="seconds between two looks")
    arguments = parser.parse_args()
    if not 0.05 <= arguments.poll_s <= 60:
        parser.error("--poll-s must be from 0.05 to 60 seconds")
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    try:
        worker = Worker(open_database(), poll_s=arguments.poll_s)
    except (DatabaseProblem, WorkerProblem) as problem:
        print(problem, file=sys.stderr)
        return 1
    return serve(worker, once=arguments.once)


if __name__ == "__main__":
    sys.exit(main())
