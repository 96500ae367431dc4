"""`peakmark trace` as a person and a program meet it; the trace itself is a stand-in here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planner.memory
from app import trace_process
from app.commands import trace as trace_command
from planner.traced import file_name, traceable_config

SHIPPED = Path(planner.memory.__file__).parent / "traced"
BLOOM = {
    "model_type": "bloom",
    "vocab_size": 250880,
    "hidden_size": 1024,
    "n_layer": 24,
    "n_head": 16,
    "layer_norm_epsilon": 1e-5,
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What the command asked to be traced; a trace made before stands in for the result."""
    specs: list[Mapping[str, Any]] = []

    def stand_in(spec: Mapping[str, Any], out: Path, **_: Any) -> None:
        specs.append(spec)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED / file_name(traceable_config(BLOOM)[0]), out)

    monkeypatch.setattr(trace_process, "run_trace", stand_in)
    return specs


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "bloom.json"
    path.write_text(json.dumps({**BLOOM, "hidden_dropout": 0.1}))
    return str(path)


def test_a_trace_says_what_the_model_is_and_how_to_plan_it(
    run: Run, asked: list[Mapping[str, Any]], config: str, tmp_path: Path
) -> None:
    code, out, _ = run("trace", config)
    assert code == 0
    assert "BloomForCausalLM: 559.2 M parameters in 24 layers" in out
    assert f"peakmark plan --config {config} --attention eager" in out
    (spec,) = asked
    assert spec["config"]["hidden_dropout"] == 0.0
    assert spec["attention"] == ["eager", "sdpa"]
    assert (spec["compute"], spec["checkpointing"]) == (["bf16"], ["none", "full"])
    assert len(list((tmp_path / "traced").iterdir())) == 1


def test_choices_narrow_what_is_traced(
    run: Run, asked: list[Mapping[str, Any]], config: str
) -> None:
    options = ("--attention", "eager", "--precision", "fp32", "--checkpointing", "selective")
    code, out, _ = run("trace", config, *options, "--json")
    assert code == 0
    document = json.loads(out)
    h = 1024
    assert document["parameters_by_group"] == {
        "embedding": 250880 * h,
        "layer": 24 * (12 * h * h + 13 * h),
        "head": 4 * h,
    }
    assert [asked[0][key] for key in ("attention", "compute", "checkpointing")] == [
        ["eager"],
        ["fp32"],
        ["selective"],
    ]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("{", (), "not JSON that can be read"),
        ("[]", (), "model.config is a list"),
        ('{"model_type": "bloom", "n_layer": 1000000}', (), "from 1 to 1024"),
        ('{"model_type": "x", "auto_map": {"AutoModel": "a.B"}}', (), "never run"),
        ("{}", (), "model.config.model_type is None"),
        (json.dumps(BLOOM), ("--attention", "flash"), "--attention is 'flash'"),
        (json.dumps(BLOOM), ("--precision", "int8"), "--precision is 'int8'"),
    ],
)
def test_what_cannot_be_traced_is_one_sentence(
    run: Run,
    asked: list[Mapping[str, Any]],
    tmp_path: Path,
    text: str,
    options: tuple[str, ...],
    words: str,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, _, error = run("trace", str(path), *options)
    assert code == 2
    assert words in error
    assert error.count("\n") == 1
    assert asked == []


def test_a_missing_file_is_one_sentence(run: Run) -> None:
    code, _, error = run("trace", "nowhere.json")
    assert (code, error.count("\n")) == (2, 1)
    assert "cannot be read from nowhere.json" in error


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        (["eager/bf16/none", "sdpa/bf16/none"], ""),
        (["eager/fp32/none"], " --attention eager --precision fp32"),
        (["eager/bf16/full", "sdpa/bf16/full"], " --checkpointing full"),
    ],
)
def test_the_command_that_plans_a_traced_model_names_what_was_traced(
    keys: list[str], options: str
) -> None:
    file = SimpleNamespace(variants=[SimpleNamespace(key=key) for key in keys])
    line = trace_command._plan_line(file, "owner/name")  # type: ignore[arg-type]
    assert line == f"peakmark plan --model owner/name{options}"
