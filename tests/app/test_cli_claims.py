"""`peakmark claims` and `peakmark export` on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.claim_words import claimed_text, range_text, value_text
from app.commands import claims


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[Any, str, str]:
    monkeypatch.setattr("sys.argv", ["peakmark", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    return end.value.code, told.out, told.err


FOUND = [
    {
        "id": "zero_4",
        "says": "ZeRO saves 4 times.",
        "quote": "4x",
        "said_in": {"title": "a text", "english": "a text", "file": "a.txt"},
        "unit": "times",
        "claimed": {"low": 3.8, "high": 4.2},
        "needs": "Many ranks.",
        "because": "ranks are many",
        "verdict": "holds only when",
        "left_out": None,
        "computed": [
            {"condition": "8", "value": 2.909, "agrees": False, "how": "f", "own_plan": False},
            {
                "condition": "your plan",
                "value": 2.425,
                "agrees": False,
                "how": "g",
                "own_plan": True,
            },
        ],
        "measured": [],
    }
]


def test_claims_are_judged_in_a_line_or_case_by_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claims, "claim_documents", lambda plan: FOUND)
    code, out, _ = run(monkeypatch, capsys, "claims")
    assert not code
    assert "zero_4: Holds only when ranks are many." in " ".join(out.split())
    assert "2.91×" in out and "2.42×" in out and "not measured" in out
    code, out, _ = run(monkeypatch, capsys, "claims", "--claim", "zero_4")
    assert not code
    assert "Said in a.txt, a text: 4x" in out and "Needs: Many ranks." in out
    code, out, _ = run(monkeypatch, capsys, "claims", "--json")
    assert json.loads(out) == {"schema": 1, "claims": FOUND}
    monkeypatch.setattr(claims, "claim_documents", None)  # refused before anything is computed
    code, _, err = run(monkeypatch, capsys, "claims", "--claim", "nope")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("peakmark: --claim is 'nope': it must be one of score_matrix, layers,")


def test_values_in_words() -> None:
    assert value_text(268_435_456, "bytes") == "256.00 MiB"
    assert value_text(18e9, "bytes", "GB") == "18.00 GB"
    assert value_text(0.98437, "share") == "98.44 %"
    assert value_text(0.003471, "share") == "0.35 %"
    assert value_text(-0.5, "share") == "−50 %"
    assert value_text(7424, "tokens") == "7,424 tokens"
    assert value_text(32418.4, "times") == "32,418×"
    assert range_text([], "times") == "not measured"
    ends = {"unit": "tokens", "claimed": {"low": 8192, "high": None}}
    assert claimed_text(ends) == "at least 8,192 tokens"
    assert claimed_text({"unit": "bytes", "claimed": {"low": None, "high": 2**30}}) == (
        "at most 1.00 GiB"
    )


def test_an_export_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capsys, "export", "--to", "vllm", "--serve", "--gpus", "1")
    assert not code
    line = out.splitlines()[3]
    assert shlex.split(line)[:4] == ["exec", "vllm", "serve", "meta-llama/Llama-3.1-8B"]
    # One line, however narrow the terminal is.
    assert line.endswith("--gpu-memory-utilization 0.9")


def test_an_export_is_written_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("export", "--to", "deepspeed", "--zero", "2", "--folder", str(tmp_path), "--json")
    code, out, _ = run(monkeypatch, capsys, *words)
    assert not code
    (file,) = json.loads(out)["files"]
    assert (tmp_path / "ds_config.json").read_text() == file["text"]
    assert json.loads(file["text"])["zero_optimization"] == {"stage": 2}
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert "has ds_config.json already" in err
    code, _, err = run(monkeypatch, capsys, *words[:-2], str(tmp_path / "no"))
    assert code == 2
    assert "is no folder" in err


def test_a_wrong_target_or_script_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "export", "--to", "megatron")
    assert code == 2
    assert err.startswith("peakmark: export.to is 'megatron': it must be one of deepspeed")
    code, _, err = run(monkeypatch, capsys, "export", "--to", "torchrun", "--script", "-c")
    assert code == 2
    assert err.startswith("peakmark: export.script is '-c'")
