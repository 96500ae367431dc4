"""Facts carry their sources, and dependencies their bounds."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["gpus", "interconnects", "models"])
def test_every_row_names_its_source(root: Path, name: str) -> None:
    rows = json.loads((root / f"planner/data/{name}.json").read_text())
    assert rows
    assert [row["id"] for row in rows if not row.get("source")] == []


@pytest.mark.parametrize("name", ["gpus", "interconnects", "models"])
def test_ids_are_unique(root: Path, name: str) -> None:
    ids = [row["id"] for row in json.loads((root / f"planner/data/{name}.json").read_text())]
    assert len(ids) == len(set(ids))


def test_every_dependency_has_a_lower_and_an_upper_bound(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    loose = [
        requirement
        for requirement in project["dependencies"]
        if not re.match(r"^[a-z0-9-]+>=[\d.]+,<[\d.]+(;.*)?$", requirement)
    ]
    assert loose == []
    assert project["requires-python"] == ">=3.11"


def test_planner_data_is_part_of_the_package(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["planner"]
    packed = {path for pattern in patterns for path in (root / "planner").glob(pattern)}
    data = {path for path in (root / "planner").rglob("*") if path.suffix == ".json"}
    assert data <= packed
