"""Starts one job and sees that nothing of it outlives its end: `python -m runners.supervisor DIR`.

It is a process of its own, without torch, so that a job ends with its deadline or with its worker
even when the worker is killed. SIGINT stops the job because a person cancelled it, SIGTERM because
the worker stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from runners.contract import write_json_atomically
from runners.outcome import ENDING_FILE, STDERR_FILE, STDOUT_FILE, Ending, StoppedBy
from runners.process_tree import ProcessId, become_subreaper, is_alive, kill_run

LAUNCH_FILE = "launch.json"
GRACE_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a supervisor needs to know; the worker writes it to `launch.json`."""

    run_id: str
    command: list[str]
    deadline_s: float
    grace_s: float
    worker: ProcessId

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "run_id": self.run_id,
            "command": self.command,
            "deadline_s": self.deadline_s,
            "grace_s": self.grace_s,
            "worker": [self.worker.pid, self.worker.start_ticks],
        }

    @classmethod
    def read(cls, path: Path) -> Launch:
        """Read the JSON form from a file."""
        data = json.loads(path.read_text())
        return cls(**{**data, "worker": ProcessId(*data["worker"])})


class Supervisor:
    """One job from its start to the last of its processes."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._launch = Launch.read(run_directory / LAUNCH_FILE)
        self._asked: StoppedBy | None = None

    def run(self) -> Ending:
        """Run the job to its end, or stop it; nothing of it is left when this returns."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        become_subreaper()
        oom_kills_before = count_oom_kills()
        deadline = time.monotonic() + self._launch.deadline_s
        job = self._start()
        stopped_by = self._watch(job, deadline)
        if stopped_by is not None:
            self._terminate(job)
        kill_run(self._launch.run_id, below=os.getpid())
        exit_code = job.wait()
        _reap_orphans()
        oom_kills = count_oom_kills() - oom_kills_before
        return Ending(exit_code=exit_code, stopped_by=stopped_by, oom_kills=oom_kills)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        cancelled = number == signal.SIGINT
        self._asked = StoppedBy.CANCEL if cancelled else StoppedBy.WORKER_STOPPED

    def _start(self) -> subprocess.Popen[bytes]:
        with (
            (self._directory / STDOUT_FILE).open("ab") as stdout,
            (self._directory / STDERR_FILE).open("ab") as stderr,
        ):
            return subprocess.Popen(
                self._launch.command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _watch(self, job: subprocess.Popen[bytes], deadline: float) -> StoppedBy | None:
        while job.poll() is None:
            if self._asked is not None:
                return self._asked
            if time.monotonic() >= deadline:
                return StoppedBy.DEADLINE
            if not is_alive(self._launch.worker):
                return StoppedBy.WORKER_GONE
            time.sleep(_POLL_S)
        return None

    def _terminate(self, job: subprocess.Popen[bytes]) -> None:
        """Let the job end by itself: torchrun's agent then closes its ranks in their sessions."""
        _signal_group(job.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(self._launch.grace_s)
        _signal_group(job.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _reap_orphans() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def count_oom_kills() -> int:
    """Return how often the kernel killed for memory in our control group (v2), 0 if unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].split("\n")[0]
        events = Path("/sys/fs/cgroup", group, "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0


def main() -> None:
    """Supervise the run directory named on the command line."""
    directory = Path(sys.argv[1])
    ending = Supervisor(directory).run()
    write_json_atomically(directory / ENDING_FILE, ending.to_dict())


if __name__ == "__main__":
    main()
