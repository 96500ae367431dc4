"""Short functions, short files."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median, quantiles

ROOMS = {"app", "db", "kernels", "planner", "runners", "scripts"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def functions(modules: dict[Path, ast.Module]) -> dict[str, int]:
    """Length in lines of every function outside tests, by `path:line name`."""
    return {
        f"{path}:{node.lineno} {node.name}": lines(node)
        for path, tree in modules.items()
        if path.parts[0] in ROOMS
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }


def test_no_function_is_longer_than_80_lines(modules: dict[Path, ast.Module]) -> None:
    assert {name: n for name, n in functions(modules).items() if n > 80} == {}


def test_functions_are_short_on_the_whole(modules: dict[Path, ast.Module]) -> None:
    sizes = list(functions(modules).values())
    assert median(sizes) <= 12
    assert quantiles(sizes, n=10)[-1] <= 40


def test_no_file_is_longer_than_500_lines(root: Path, files: list[Path]) -> None:
    python = [path for path in files if path.suffix == ".py"]
    sizes = {str(path): (root / path).read_text().count("\n") for path in python}
    assert {name: n for name, n in sizes.items() if n > 500} == {}
