"""A job without torch, for the tests of worker and supervisor: `fake_job.py MODE OUT_DIR`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RESULT = {
    "schema": 1,
    "outcome": "done",
    "measured": {"allocated_bytes": 1234, "step_time_s": 0.5, "loss": float("nan")},
    "environment": {"gpu": None, "torch": "none"},
    "error": None,
}


def leave_result(out: Path, **changes: object) -> None:
    partial = out / "result.partial"
    partial.write_text(json.dumps({**RESULT, **changes}))
    partial.replace(out / "result.json")


def note_pid(out: Path) -> None:
    (out / "pids").mkdir(exist_ok=True)
    (out / "pids" / str(os.getpid())).touch()


def start_family(out: Path) -> None:
    """Leave a grandchild in a session of its own, deaf to SIGTERM, its parent gone.

    A second one has also lost the environment that would give it away.
    """
    for environment in (dict(os.environ), {"PATH": os.environ["PATH"]}):
        nested = [sys.executable, __file__, "deaf", str(out)]
        middle = f"import subprocess; subprocess.Popen({nested!r}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", middle], check=True, env=environment)
    while len(list((out / "pids").iterdir())) < 3:
        time.sleep(0.02)
    (out / "ready").touch()


def main() -> int:
    mode, out = sys.argv[1], Path(sys.argv[2])
    note_pid(out)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    elif mode == "sleep":
        (out / "ready").touch()
        time.sleep(300)
    elif mode == "family":
        start_family(out)
        time.sleep(300)
    elif mode == "family_done":
        start_family(out)
        leave_result(out)
    elif mode == "done_then_sleep":
        leave_result(out)
        (out / "ready").touch()
        time.sleep(300)
    elif mode == "done":
        time.sleep(0.2)
        leave_result(out)
    elif mode == "oom":
        error = {"type": "OutOfMemoryError", "message": "tried to allocate 2.00 GiB"}
        leave_result(out, outcome="oom_device", error=error)
    elif mode == "truncated":
        (out / "result.json").write_text(json.dumps(RESULT)[:40])
    elif mode == "disk_full":
        # /dev/full answers every write with ENOSPC, as a full disk does.
        with Path("/dev/full").open("w") as file:
            json.dump(RESULT, file)
    elif mode == "raise":
        raise RuntimeError("the shapes do not match")
    elif mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
