"""The real worker over fake jobs: `fake_worker.py DATABASE_FILE [--once]`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from db.engine import open_database
from runners.contract import JobKind, JobSpec
from runners.worker import Worker, serve


def fake_command(spec: JobSpec, run_directory: Path) -> list[str]:
    if spec.kind is JobKind.LIMIT:
        job = str(Path(__file__).with_name("fake_limit.py"))
        return [sys.executable, job, str(run_directory / "spec.json"), str(run_directory)]
    assert spec.attention is not None
    job = str(Path(__file__).with_name("fake_job.py"))
    return [sys.executable, job, str(spec.attention["fake"]), str(run_directory)]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    database = open_database(sys.argv[1], recorded=None)
    worker = Worker(database, command=fake_command, poll_s=0.1, grace_s=1.0)
    sys.exit(serve(worker, once="--once" in sys.argv))
