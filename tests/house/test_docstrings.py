"""Public functions are typed and say what they return."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOMS = {"app", "db", "kernels", "planner", "runners", "scripts"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(modules: dict[Path, ast.Module]) -> Iterator[tuple[str, Function]]:
    """Functions and methods that another module can call; nested ones are private."""
    for path, tree in modules.items():
        if path.parts[0] not in ROOMS or "migrations" in path.parts:
            continue
        holders = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for holder in holders:
            if is_autograd(holder):
                continue
            for node in holder.body:
                if isinstance(node, Function) and not node.name.startswith("_"):
                    yield f"{path}:{node.lineno} {node.name}", node


def is_triton(node: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_autograd(holder: ast.AST) -> bool:
    """Whether a class is an autograd.Function, whose methods torch names and calls."""
    return isinstance(holder, ast.ClassDef) and any(
        ast.unparse(base).endswith("Function") for base in holder.bases
    )


def is_stub(node: Function) -> bool:
    """Whether a function is a member of a protocol: its body is three dots."""
    return ast.unparse(node.body[0]) == "..."


def test_public_functions_have_docstrings(modules: dict[Path, ast.Module]) -> None:
    missing = [
        name
        for name, node in public_functions(modules)
        if not ast.get_docstring(node) and not is_stub(node)
    ]
    assert missing == []


def test_public_functions_are_typed(modules: dict[Path, ast.Module]) -> None:
    missing = [
        name
        for name, node in public_functions(modules)
        if not is_triton(node)
        and (
            node.returns is None
            or any(
                argument.annotation is None
                for argument in [*node.args.args, *node.args.kwonlyargs]
                if argument.arg not in ("self", "cls")
            )
        )
    ]
    assert missing == []


def test_modules_say_what_they_are_for(modules: dict[Path, ast.Module]) -> None:
    missing = [
        str(path)
        for path, tree in modules.items()
        if path.parts[0] in ROOMS and tree.body and not ast.get_docstring(tree)
    ]
    assert missing == []
