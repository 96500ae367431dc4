"""Prepared runs queue on a GPU's lock; a dead holder leaves it free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runners.jobs.gpu_lock import lock_path

HOLDER = """
import sys, time
from runners.jobs.gpu_lock import take_gpus
take_gpus(sys.argv[1:])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_lock_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def _start_holder(*gpus: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, *gpus], cwd=root, stdout=subprocess.PIPE, text=True
    )


def test_a_second_run_waits_until_the_first_process_is_gone() -> None:
    first, second = _start_holder("GPU-1"), None
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        second = _start_holder("GPU-2", "GPU-1")
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=1.0)
        first.kill()
        assert second.stdout is not None
        assert second.stdout.readline() == "held\n"
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()


def test_a_lock_file_name_is_safe() -> None:
    assert lock_path("../x/y").name == "peakmark-gpu-___x_y.lock"
