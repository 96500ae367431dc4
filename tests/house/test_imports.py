"""Imports run one way, and torch stays where the jobs are (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOMS = {"app", "db", "kernels", "planner", "runners"}
MAY_IMPORT = {
    "app": {"app", "planner", "db"},
    "runners": {"runners", "planner", "kernels", "db"},
    "db": {"db", "planner"},
    "kernels": {"kernels"},
    "planner": {"planner"},
}
MUST_NOT_IMPORT = {
    "planner": {"torch", "triton", "transformers", "streamlit", "sqlalchemy", "pandas"},
    "app": {"torch", "triton", "transformers"},
    "db": {"torch", "triton", "transformers", "streamlit"},
    "kernels": {"streamlit", "sqlalchemy"},
    "runners": {"streamlit"},
}
TORCH_IN_RUNNERS = (
    "jobs",
    "zero",
    "engines",
    "trace",
    "worlds",
    "measure",
    "environment",
    "serving",
)


def imported(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that a module imports, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def breaches(modules: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in modules.items():
        room = path.parts[0]
        if room not in ROOMS:
            continue
        for name in imported(tree):
            top = name.split(".")[0]
            wrong_room = top in ROOMS and top not in MAY_IMPORT[room]
            if wrong_room or top in MUST_NOT_IMPORT[room]:
                yield f"{path} imports {name}"


def test_imports_run_one_way(modules: dict[Path, ast.Module]) -> None:
    assert list(breaches(modules)) == []


def test_a_wrong_import_is_seen_wherever_it_stands() -> None:
    tree = ast.parse("def f():\n    from torch import nn\n")
    assert list(breaches({Path("planner/x.py"): tree})) == ["planner/x.py imports torch"]
    tree = ast.parse("import runners.contract")
    assert list(breaches({Path("app/x.py"): tree})) == ["app/x.py imports runners.contract"]


def test_torch_stays_in_jobs_engines_and_kernels(modules: dict[Path, ast.Module]) -> None:
    wrong = [
        f"{path} imports torch"
        for path, tree in modules.items()
        if path.parts[0] == "runners"
        and not path.parts[1].startswith(TORCH_IN_RUNNERS)
        and "torch" in {name.split(".")[0] for name in imported(tree)}
    ]
    assert wrong == []


def test_of_the_runners_only_the_worker_opens_the_database(
    modules: dict[Path, ast.Module],
) -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in modules.items()
        if path.parts[0] == "runners" and not path.name.startswith("worker")
        for name in imported(tree)
        if name.split(".")[0] in {"db", "sqlalchemy"}
    ]
    assert wrong == []


def test_pages_reach_planner_and_database_through_services_only(
    modules: dict[Path, ast.Module],
) -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in modules.items()
        if path.parts[:2] == ("app", "app_pages")
        for name in imported(tree)
        if name.split(".")[0] in {"db", "sqlalchemy"}
    ]
    assert wrong == []
