"""Strings and calls that must not stand in the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = {"app", "db", "kernels", "planner", "runners", "scripts"}
# Written in parts so that this file does not hold what it looks for.
FORBIDDEN = (
    "/" + "work/",
    "/" + "farm/",
    "/" + "root/",
    r"pypi\." + "org",
    r"npmjs\." + "org",
    r"\b(" + "TO" + "DO|FIX" + r"ME)\b",
    "trust_remote" + r"_code\s*=\s*True",
)
TEXT = {".py", ".md", ".toml", ".json", ".jsonl", ".sh", ".yml", ".yaml", ".css", ""}
# Kernels may import nothing of ours, planner.units neither.
UNIT_ROOMS = ROOMS - {"kernels"}
POWER = re.compile(r"2\s*\*\*\s*[1-4]0\b|1\s*<<\s*[1-4]0\b|\b1024\b")
BYTES = re.compile(r"bytes|[KMGT]i?B\b", re.IGNORECASE)
BANNER = re.compile(r"^\s*#\s*[-=#*~]{4,}", re.MULTILINE)


def test_no_machine_path_registry_host_or_leftover(root: Path, files: list[Path]) -> None:
    found = [
        f"{path}: {match.group(0)}"
        for path in files
        if path.suffix in TEXT
        for pattern in FORBIDDEN
        if (match := re.search(pattern, (root / path).read_text(errors="ignore")))
    ]
    assert found == []


def writes_a_unit(line: str) -> bool:
    """Whether a line that speaks of bytes holds a power of 1024."""
    return bool(POWER.search(line) and BYTES.search(line))


def test_byte_units_are_written_in_one_file(root: Path, modules: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}: {line.strip()}"
        for path in modules
        if path.parts[0] in UNIT_ROOMS and path != Path("planner/units.py")
        for line in (root / path).read_text().splitlines()
        if writes_a_unit(line)
    ]
    assert found == []


def test_no_difference_is_written_as_minus_zero(
    root: Path, modules: dict[Path, ast.Module]
) -> None:
    """`+.2f` writes -0.001 as -0.00, `+z.2f` as +0.00; a template of Plotly's has its own rules."""
    signed = re.compile(r"(?<!%\{x)(?<!%\{y):\+[,.\d]*[efg%]\}")
    found = [
        f"{path}: {line.strip()}"
        for path in modules
        if path.parts[0] in ROOMS
        for line in (root / path).read_text().splitlines()
        if signed.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_unit"),
    [
        ("LIMIT_BYTES = 64 * 1024 * 1024", True),
        ("size_bytes = 2**30", True),
        ('"MiB": 1 << 20,', True),
        ("_KIB = 1024  # bytes", True),
        ("max_value=2**30,", False),
        ("sequence_length = 1024", False),
        ("size_bytes = 3 * MIB_BYTES", False),
    ],
)
def test_the_search_for_units_tells_them_from_other_numbers(line: str, is_unit: bool) -> None:
    assert writes_a_unit(line) is is_unit


def test_no_banner_comments(root: Path, modules: dict[Path, ast.Module]) -> None:
    assert [str(path) for path in modules if BANNER.search((root / path).read_text())] == []


def dangerous_calls(tree: ast.Module) -> Iterator[str]:
    """Calls that run what a file or a person hands in: pickles, shells, eval, remote code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names):
            yield "pickle"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in {"eval", "exec", "os.system", "os.popen"} or name.startswith("pickle."):
            yield name
        if keywords.get("shell") == "True":
            yield f"{name}(shell=True)"
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield name
        if "trust_remote_code" in keywords:
            yield f"{name}(trust_remote_code=...)"


def test_nothing_that_comes_from_outside_is_executed(modules: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}: {call}"
        for path, tree in modules.items()
        if path.parts[0] in ROOMS
        for call in dangerous_calls(tree)
    ]
    assert found == []


def test_the_search_for_dangerous_calls_finds_them() -> None:
    code = "import pickle\nsubprocess.run(x, shell=True)\npickle.load(f)\ntorch.load(f)\neval(x)\n"
    assert sorted(dangerous_calls(ast.parse(code))) == sorted(
        ["pickle", "subprocess.run(shell=True)", "pickle.load", "torch.load", "eval"]
    )


def test_no_grab_bag_modules(modules: dict[Path, ast.Module]) -> None:
    bad = re.compile(r"^(utils?|helpers?|common|misc|.*_manager)\.py$")
    assert [str(path) for path in modules if bad.match(path.name)] == []
