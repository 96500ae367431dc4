"""Run a trace in a process of its own: torch and transformers stay out of this one."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.errors import PlanError

MODULE = "runners.trace.any_model"
DEADLINE_S = 900.0
_POLL_S = 0.2
_REFUSED = 2
Progress = Callable[[str], None]


def run_trace(
    spec: Mapping[str, Any], out: Path, *, deadline_s: float, on_progress: Progress
) -> None:
    """Trace what `spec` names into `out`; raises PlanError with one sentence where that fails.

    The process ends with this one's Ctrl-C and at the deadline, and leaves no half-written file.
    """
    with tempfile.TemporaryDirectory(prefix="peakmark-trace-") as name:
        folder = Path(name)
        spec_path, log_path = folder / "spec.json", folder / "log"
        spec_path.write_text(json.dumps(spec))
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(spec_path), str(out.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # Its own group: all that it starts ends with it.
                start_new_session=True,
            )
        try:
            reason = _watch(process, deadline_s, on_progress)
        finally:
            _end(process)
        if process.returncode != 0 or reason:
            raise _failed(reason or _last_words(process.returncode, log_path))


def _watch(
    process: subprocess.Popen[bytes], deadline_s: float, on_progress: Progress
) -> str | None:
    """Follow the process until it ends; returns the sentence it refused with, if it did."""
    reason = None
    for line in _lines(process, time.monotonic() + deadline_s):
        if line is None:
            return f"The trace took more than {deadline_s:g} s and was stopped: raise --deadline."
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a library's own words
        if not isinstance(event, dict):
            continue
        reason = event.get("error") or reason
        if "what" in event:
            on_progress(f"{event.get('done', 0)} of {event.get('of', 1)} traced: {event['what']}")
    process.wait()
    return reason


def _lines(process: subprocess.Popen[bytes], end_at: float) -> Iterator[bytes | None]:
    """Yield stdout's lines as they come; None once the time is up."""
    assert process.stdout is not None
    pending, descriptor = b"", process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if time.monotonic() > end_at:
                yield None
                return
            if not selector.select(_POLL_S):
                continue
            piece = os.read(descriptor, 65_536)
            if not piece:
                return
            *lines, pending = (pending + piece).split(b"\n")
            yield from lines


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_words(code: int, log_path: Path) -> str:
    """Say in one sentence how a process ended that left none of its own."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"The trace was killed by {name}: the machine may be short of memory."
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:200] if lines else "it said nothing"
    return f"The trace ended with exit code {code}: {last.rstrip('.')}."


def _failed(sentence: str) -> PlanError:
    return PlanError("model.config", None, "a model that can be traced", sentence=sentence)
