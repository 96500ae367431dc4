"""Decide how a run ended from what it left: its result file, its exit code, its last words."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.units import KIB_BYTES, MIB_BYTES
from runners.contract import RESULT_FILE, SCHEMA, JobResult, Outcome

STDOUT_FILE = "stdout.log"
STDERR_FILE = "stderr.log"
SUPERVISOR_LOG = "supervisor.log"
ENDING_FILE = "supervisor.json"

_TAIL_BYTES = 64 * KIB_BYTES
_MAX_RESULT_BYTES = 64 * MIB_BYTES
_MAX_WHY_CHARACTERS = 500


class StoppedBy(StrEnum):
    """Why the supervisor stopped a job that was still running."""

    CANCEL = "cancel"
    DEADLINE = "deadline"
    WORKER_STOPPED = "worker_stopped"
    WORKER_GONE = "worker_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the supervisor saw of a job's end; `exit_code` is negative for a signal.

    `oom_kills` counts the processes that the kernel killed for memory meanwhile.
    """

    exit_code: int | None
    stopped_by: StoppedBy | None = None
    oom_kills: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema version."""
        return {
            "schema": SCHEMA,
            "exit_code": self.exit_code,
            "stopped_by": self.stopped_by,
            "oom_kills": self.oom_kills,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Classified:
    """How a run ended, one sentence of why, and its result where it left a valid one."""

    outcome: Outcome
    why: str | None
    result: JobResult | None = None


_STOPPED = {
    StoppedBy.CANCEL: (Outcome.CANCELLED, "cancelled while it ran"),
    StoppedBy.DEADLINE: (Outcome.TIMED_OUT, "its deadline passed"),
    StoppedBy.WORKER_STOPPED: (Outcome.LOST, "the worker was stopped"),
    StoppedBy.WORKER_GONE: (Outcome.LOST, "the worker vanished"),
}

# What libraries print when they die; only consulted when the job wrote no result of its own.
_LAST_WORDS = (
    (
        r"torch\.OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(?:INTERNAL_ERROR_DEVICE_)?ALLOC\w*_FAILED"
        r"|NCCL.{0,200}out of memory",
        Outcome.OOM_DEVICE,
        "out of device memory (inferred from the log)",
    ),
    (
        r"^MemoryError\b|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory",
        Outcome.OOM_HOST,
        "out of host memory (inferred from the log)",
    ),
    (r"No space left on device", Outcome.FAILED, "the disk is full: the job could not write"),
    (
        r"\bXid\b|uncorrectable ECC|unspecified launch failure",
        Outcome.CRASHED,
        "the GPU reported a hardware fault (inferred from the log)",
    ),
    (
        r"Watchdog caught collective operation timeout",
        Outcome.CRASHED,
        "a rank stopped or did not answer within NCCL's timeout: look at what each rank printed last "
        "(inferred from the log)",
    ),
)
# torchrun's own summary: other failures, then the rank that failed first.
_ROOT_CAUSE = "Root Cause (first observed failure)"
_RANK_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)")
_FAILED_RANK = re.compile(r"rank\s*:\s*(\d+) \(local_rank")


class ResultProblem(Exception):  # noqa: N818 - described to a person, not raised to one
    """The result file is there but cannot be used; `str()` says why."""


def read_ending(run_directory: Path) -> Ending | None:
    """Return what the supervisor wrote; None when it wrote nothing usable."""
    try:
        data = json.loads((run_directory / ENDING_FILE).read_text())
        stopped_by = data["stopped_by"]
        return Ending(
            exit_code=data["exit_code"],
            stopped_by=None if stopped_by is None else StoppedBy(stopped_by),
            oom_kills=data["oom_kills"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_result(run_directory: Path) -> JobResult | None:
    """Return the job's result; None when it left none. Raises ResultProblem when it is unusable.

    NaN and infinity, which JSON does not have, become null.
    """
    path = run_directory / RESULT_FILE
    try:
        if path.stat().st_size > _MAX_RESULT_BYTES:
            raise ResultProblem("it is larger than 64 MiB")
        data = json.loads(path.read_text(), parse_constant=lambda _: None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultProblem(f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultProblem("it is not JSON (cut off?)") from error
    _check_result(data)
    return JobResult.from_dict(data)


def _check_result(data: object) -> None:
    if not isinstance(data, dict):
        raise ResultProblem("it is not an object")
    if data.get("schema") != SCHEMA:
        raise ResultProblem(f"its schema is {data.get('schema')!r}, not {SCHEMA}")
    if data.get("outcome") not in set(Outcome):
        raise ResultProblem(f"its outcome {data.get('outcome')!r} is not known")
    for name in ("measured", "environment"):
        if not isinstance(data.get(name), dict):
            raise ResultProblem(f"its field {name!r} is not an object")
    if not isinstance(data.get("error"), dict | None):
        raise ResultProblem("its field 'error' is not an object")


def classify(ending: Ending | None, run_directory: Path) -> Classified:
    """Say how a run ended; a valid result wins over everything that happened around it.

    But for a result that says "failed" while the run was being stopped, or a rank of it killed:
    it only describes how the other ranks fared then.
    `ending` is None when the supervisor itself was killed.
    """
    try:
        result = read_result(run_directory)
        problem = None
    except ResultProblem as error:
        result, problem = None, f"the job's result file cannot be used: {error}"
    if result is not None and result.outcome is Outcome.CANCELLED:
        # A job that was stopped says what it had seen; why it was, its supervisor knows.
        outcome, why = _STOPPED[(ending and ending.stopped_by) or StoppedBy.CANCEL]
        return Classified(outcome=outcome, why=why, result=result)
    if result is not None and not _is_echo(result, ending, run_directory):
        return Classified(outcome=result.outcome, why=_describe_result(result), result=result)
    if ending is None:
        return Classified(outcome=Outcome.CRASHED, why=problem or _supervisor_end(run_directory))
    if ending.stopped_by is not None:
        outcome, why = _STOPPED[ending.stopped_by]
        return Classified(outcome=outcome, why=why)
    if problem is not None:
        return Classified(outcome=Outcome.FAILED, why=problem)
    return _classify_exit(ending, run_directory)


def _is_echo(result: JobResult, ending: Ending | None, run_directory: Path) -> bool:
    if result.outcome is not Outcome.FAILED or ending is None:
        return False
    return ending.stopped_by is not None or _exit_code(ending, last_words(run_directory)) < 0


def _exit_code(ending: Ending, words: str) -> int:
    """Return the exit code of the process that failed first; torchrun's own is always 1."""
    rank_code = _RANK_EXIT_CODE.search(_root_cause(words))
    return int(rank_code[1]) if rank_code else ending.exit_code or 0


def _root_cause(words: str) -> str:
    return words[max(words.rfind(_ROOT_CAUSE), 0) :]


def _failed_rank(words: str) -> str:
    """Name the rank that torchrun says failed first, "it" where there is one process alone."""
    rank = _FAILED_RANK.search(_root_cause(words))
    return f"rank {rank[1]}" if rank else "it"


def _supervisor_end(run_directory: Path) -> str:
    words = _read_tail(run_directory / SUPERVISOR_LOG).split("\n")
    line = next((line for line in reversed(words) if line.strip()), None)
    return "its supervisor was killed" if line is None else f"its supervisor failed: {line}"


def _describe_result(result: JobResult) -> str | None:
    if result.error is None:
        return None
    message = result.error.get("message") or result.error.get("type")
    return None if message is None else str(message)[:_MAX_WHY_CHARACTERS]


def _classify_exit(ending: Ending, run_directory: Path) -> Classified:
    if ending.exit_code == 0:
        return Classified(outcome=Outcome.FAILED, why="the job ended without leaving a result")
    words = last_words(run_directory)
    code = _exit_code(ending, words)
    if code == -signal.SIGKILL and ending.oom_kills > 0:
        return Classified(
            outcome=Outcome.OOM_HOST, why=f"the kernel killed {_failed_rank(words)} for host memory"
        )
    for pattern, outcome, why in _LAST_WORDS:
        if re.search(pattern, words, re.MULTILINE):
            return Classified(outcome=outcome, why=why)
    if code < 0:
        why = f"{_failed_rank(words)} was killed by {_signal_name(-code)}"
        return Classified(outcome=Outcome.CRASHED, why=why)
    line = next((line for line in reversed(words.splitlines()) if line.strip()), "")
    why = f"it ended with exit code {code}: {line.strip()}"[:_MAX_WHY_CHARACTERS]
    return Classified(outcome=Outcome.FAILED, why=why.removesuffix(": "))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(run_directory: Path) -> str:
    """Return the end of what the job's processes printed as errors, the main one's last."""
    ranks = sorted((run_directory / "ranks").rglob("stderr.log"))
    return "\n".join(_read_tail(path) for path in [*ranks, run_directory / STDERR_FILE])


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
