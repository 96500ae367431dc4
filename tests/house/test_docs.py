"""The documentation says what is there, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from app.cli import app
from planner import plan, workload
from planner.export.target import Target
from planner.verdict import State
from runners.contract import JobKind, Outcome, World

COMMANDS = {
    "plan",
    "sweep",
    "levers",
    "compare",
    "trace",
    "prove",
    "calibrate",
    "attention",
    "decode",
    "serve",
    "profile",
    "quality",
    "claims",
    "export",
    "presets",
    "worker",
    "runs",
    "runs show",
    "runs cancel",
    "runs export",
    "accuracy",
    "import",
    "doctor",
    "experiments",
    "experiments list",
    "experiments show",
    "experiments export",
}
CHOICES = (
    JobKind,
    Outcome,
    World,
    State,
    plan.Job,
    workload.Engine,
    workload.Optimizer,
    workload.Precision,
    workload.Attention,
    workload.Checkpointing,
    workload.WeightsDtype,
    workload.KvDtype,
    workload.Loss,
    workload.LoraTargets,
    workload.BaseDtype,
    Target,
)


def command_names() -> dict[str, set[str]]:
    """Every command of the command line with its options."""
    group = typer.main.get_command(app)
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        members = {name: command}
        for sub, child in getattr(command, "commands", {}).items():
            members[f"{name} {sub}"] = child
        for full, member in members.items():
            found[full] = {option for p in member.params for option in p.opts}
    return found


def test_the_commands_are_the_ones_we_know() -> None:
    assert set(command_names()) == COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS - {"runs", "experiments"}))
def test_every_command_can_answer_in_json(name: str) -> None:
    assert "--json" in command_names()[name]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_readme_shows_every_command(root: Path, name: str) -> None:
    assert re.search(rf"^peakmark {name}\b", (root / "README.md").read_text(), re.MULTILINE)


def test_commands_in_the_docs_exist_with_their_options(root: Path, files: list[Path]) -> None:
    known = command_names()
    wrong = []
    for path in files:
        if path.suffix != ".md":
            continue
        for line in re.findall(r"(?:^|`)peakmark ([^`\n]+)", (root / path).read_text(), re.M):
            words = line.split()
            two = " ".join(words[:2])
            name = two if two in known else words[0].rstrip("|,")
            options = {word for word in words if word.startswith("--")}
            if name not in known or not options <= known[name]:
                wrong.append(f"{path}: peakmark {line}")
    assert wrong == []


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.__name__)
def test_architecture_names_every_choice(root: Path, choice: type) -> None:
    text = (root / "docs/architecture.md").read_text()
    assert [str(member) for member in choice if f"`{member}`" not in text] == []  # type: ignore[attr-defined]


def test_make_targets_in_the_docs_exist(root: Path, files: list[Path]) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for path in files
        if path.suffix == ".md"
        for target in re.findall(r"(?:^|`)make ([a-z]+)", (root / path).read_text(), re.MULTILINE)
    }
    assert named <= targets
    assert {"run", "test"} <= named


def test_links_between_documents_lead_somewhere(root: Path, files: list[Path]) -> None:
    broken = [
        f"{path}: {link}"
        for path in files
        if path.suffix == ".md"
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (root / path).read_text())
        if "://" not in link and not (root / path.parent / link).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_usual_files_are_there(root: Path, name: str) -> None:
    assert (root / name).stat().st_size > 500
