"""The job `limit` over training steps that are not run: `fake_limit.py SPEC OUT`.

A run with a micro-batch above `LARGEST` runs out of memory, one of `HANGS` does not end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

LARGEST, HANGS = 11, 9


def main() -> int:
    if sys.argv[1] == "trial":
        return run_trial(Path(sys.argv[2]))
    from runners.contract import JobSpec
    from runners.jobs.limit import run_limit

    def command(spec: JobSpec, folder: Path) -> list[str]:
        return [sys.executable, __file__, "trial", str(folder)]

    return run_limit(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), command)


def run_trial(folder: Path) -> int:
    spec = json.loads((folder / "spec.json").read_text())
    batch = spec["plan"]["workload"]["micro_batch"]
    (folder / "ready").touch()
    if batch == HANGS:
        time.sleep(300)
    if batch == 3:
        raise RuntimeError("the shapes do not match")
    fits = batch <= LARGEST
    result = {
        "schema": 1,
        "outcome": "done" if fits else "oom_device",
        "measured": {"device_bytes": batch * 2**30} if fits else {},
        "environment": {"gpu": {"name": "none"}},
        "error": None if fits else {"type": "OutOfMemoryError", "message": "tried to allocate"},
    }
    (folder / "result.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
