"""A trace in a process of its own: how it ends, whatever happens to it."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path

import pytest

from app import trace_process
from planner.errors import PlanError


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that runs in place of the trace; tests write it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trace_process, "MODULE", "stand_in_trace")
    return tmp_path / "stand_in_trace.py"


def run(out: Path, deadline_s: float = 60.0) -> list[str]:
    said: list[str] = []
    trace_process.run_trace({"config": {}}, out, deadline_s=deadline_s, on_progress=said.append)
    return said


def test_progress_is_passed_on_and_the_file_is_there(stand_in: Path, tmp_path: Path) -> None:
    stand_in.write_text(
        textwrap.dedent(
            """
            import json, sys
            print(json.dumps({"done": 1, "of": 2, "what": "sdpa"}))
            print("a library says something")
            open(sys.argv[2], "w").write(open(sys.argv[1]).read())
            """
        )
    )
    assert run(tmp_path / "out.json") == ["1 of 2 traced: sdpa"]
    assert json.loads((tmp_path / "out.json").read_text()) == {"config": {}}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('print(\'{"error": "It is no model."}\'); sys.exit(2)', "^It is no model.$"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL: the machine may be short of memory"),
        ("raise RuntimeError('broken inside')", "exit code 1: RuntimeError: broken inside"),
        ("sys.exit(3)", "exit code 3: it said nothing"),
    ],
)
def test_a_process_that_fails_leaves_one_sentence(
    stand_in: Path, tmp_path: Path, code: str, words: str
) -> None:
    stand_in.write_text(f"import os, sys\n{code}\n")
    with pytest.raises(PlanError, match=words):
        run(tmp_path / "out.json")


def test_at_the_deadline_it_is_ended_with_all_that_it_started(
    stand_in: Path, tmp_path: Path
) -> None:
    stand_in.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(PlanError, match="more than 3 s and was stopped: raise --deadline"):
        run(tmp_path / "out.json", deadline_s=3.0)
    own, child = map(int, (tmp_path / "pids").read_text().split())
    assert not is_running(own)
    for _ in range(200):  # killed already; its end may take the kernel a moment
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_trace_itself_refuses_in_one_sentence_and_downloads_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="knows no architecture 'nonsense'"):
        trace_process.run_trace(
            {
                "config": {"model_type": "nonsense"},
                "attention": ["eager"],
                "compute": ["bf16"],
                "checkpointing": ["none"],
            },
            tmp_path / "out.json",
            deadline_s=300.0,
            on_progress=lambda text: None,
        )
    assert not (tmp_path / "out.json").exists()
