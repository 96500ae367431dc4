"""Find, name and end the processes of a run, through Linux's /proc.

Everything that a run starts carries its id in the environment (`TAG_VARIABLE`), and only what
carries it, or descends from our own child, is ever killed. A pid alone names nothing: pids are
reused, so a process is named by its pid and its start time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TAG_VARIABLE = "PEAKMARK_RUN_ID"
_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_ZOMBIE_STATES = frozenset("ZX")


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process, named for good: `start_ticks` are clock ticks since the machine started."""

    pid: int
    start_ticks: int


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return (state letter, start ticks) of a process; None when there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command, in brackets, may hold spaces and brackets: read from the last one on.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """Name the process that has this pid now; None when there is none, or only its corpse."""
    stat = _read_stat(pid)
    if stat is None or stat[0] in _ZOMBIE_STATES:
        return None
    return ProcessId(pid, stat[1])


def is_alive(process: ProcessId) -> bool:
    """Say whether this very process still runs (a zombie does not)."""
    return identify(process.pid) == process


def become_subreaper() -> None:
    """Have orphaned descendants become our children, so that none escapes by a double fork."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _children(pid: int) -> Iterator[int]:
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            yield from (int(child) for child in file.read_text().split())
        except OSError:
            continue


def descendants(pid: int) -> set[ProcessId]:
    """Return every living process below `pid`."""
    found: set[ProcessId] = set()
    waiting = list(_children(pid))
    while waiting:
        child = waiting.pop()
        process = identify(child)
        if process is not None:
            found.add(process)
        waiting.extend(_children(child))
    return found


def tagged(run_id: str) -> set[ProcessId]:
    """Return every living process of this user that carries the run's id, but not the caller."""
    wanted = f"{TAG_VARIABLE}={run_id}".encode()
    found: set[ProcessId] = set()
    for directory in _PROC.iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            variables = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        process = identify(int(directory.name)) if wanted in variables else None
        if process is not None:
            found.add(process)
    return found


def send(processes: Iterable[ProcessId], signal_number: int) -> None:
    """Signal processes that are still themselves; those that ended meanwhile are passed over."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal_number)


def kill_run(run_id: str, *, below: int | None = None, patience_s: float = 10.0) -> bool:
    """SIGKILL what carries the run's id, and what descends from `below`, until nothing is left.

    Returns False when something outlived `patience_s` (a process stuck in the kernel).
    """
    give_up = time.monotonic() + patience_s
    seen: set[ProcessId] = set()
    empty_looks = 0
    while True:
        # One that is ending has lost its variables before it is gone, and one that has just been started
        # has not got them yet: what was seen has to be dead, and nothing new found twice.
        seen |= tagged(run_id) | (descendants(below) if below is not None else set())
        left = set(filter(is_alive, seen))
        empty_looks = 0 if left else empty_looks + 1
        if empty_looks == 2:
            return True
        if time.monotonic() > give_up:
            return False
        # One that forks while we look is found in the next round: all of its kind die first.
        send(left, signal.SIGKILL)
        time.sleep(_POLL_S)
