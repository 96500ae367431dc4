"""The Dockerfile is what it says, and every RUN line of it runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_dockerfile", root / "scripts/check_dockerfile.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def may_mount() -> bool:
    """Whether this process may make mount namespaces: root outside of most containers."""
    if os.geteuid() != 0:
        return False
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def test_continued_lines_are_joined_and_comments_dropped(check: ModuleType) -> None:
    text = "# first\nFROM a\n\nRUN one \\\n    && two\n  # inside\nuser b\n"
    found = [(i.name, i.argument) for i in check.read_instructions(text)]
    assert found == [("FROM", "a"), ("RUN", "one && two"), ("USER", "b")]


def test_the_replay_keeps_order_and_every_run_line(check: ModuleType, root: Path) -> None:
    instructions = check.read_instructions((root / "Dockerfile").read_text())
    script = check.shell_script(instructions, [".git"])
    runs = [i.argument for i in instructions if i.name == "RUN"]
    assert len(runs) >= 4
    places = [script.index(f"\n{run}\n") for run in runs]
    assert places == sorted(places)


def test_the_image_runs_as_a_user_with_volume_health_check_and_init(
    check: ModuleType, root: Path
) -> None:
    found = {i.name: i.argument for i in check.read_instructions((root / "Dockerfile").read_text())}
    assert found["USER"] == "peakmark"
    assert found["VOLUME"] == "/data"
    assert "scripts/healthcheck.py" in found["HEALTHCHECK"]
    assert found["ENTRYPOINT"].startswith('["tini", "--"')
    assert found["CMD"] == '["web"]'
    assert "sqlite:////data/" in found["ENV"]


def test_packages_that_are_linked_would_be_installed(check: ModuleType, root: Path) -> None:
    named = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = {_name(text) for text in named}
    needed = {_name(text) for name in direct for text in metadata.requires(name) or ()}
    assert set(check.LINKED) <= direct | needed


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].lower()


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root and the right to mount")
def test_every_run_line_runs(root: Path) -> None:
    command = ["python3", "scripts/check_dockerfile.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
