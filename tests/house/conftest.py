"""What the house-rule tests read: the files of the repository and their syntax trees."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every file that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def modules(files: list[Path]) -> dict[Path, ast.Module]:
    """The syntax tree of every Python file of the repository."""
    return {path: ast.parse((ROOT / path).read_text()) for path in files if path.suffix == ".py"}
