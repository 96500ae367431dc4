"""Engines timed in turns: four fresh processes a pair, on the CPU here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from planner.records import read_file
from planner.same_run import same_run_pairs
from planner.workload import Engine
from runners import bench_engines, record
from runners.bench_engines import pair_entries, summary_lines
from runners.record import read_matrix

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def _matrix(path: Path, engine: str = "peakmark") -> Path:
    plan = {
        "schema": 1,
        "job": "train",
        "model": {"config": CONFIG, "name": "tiny"},
        "workload": {"sequence_length": 8, "precision": "mixed"},
        "parallelism": {"engine": engine, "zero_stage": 3, "world_size": 8},
        "hardware": {"preset": "h200"},
    }
    run = {"kind": "train_step", "world": "solo", "device": "cpu", "steps": 3, "plan": plan}
    path.write_text(json.dumps({"schema": 1, "defaults": {}, "runs": [run]}))
    return path


def test_a_pair_runs_in_turns_and_becomes_four_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ("-m", "runners.bench_engines", str(_matrix(tmp_path / "m.json")), str(out))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_file(out)
    engines = [row.spec["plan"]["parallelism"]["engine"] for row in rows]
    assert engines == ["peakmark", "fsdp2", "fsdp2", "peakmark"]
    assert [row.measured["same_run"]["turn"] for row in rows] == [0, 1, 2, 3]
    [pair] = same_run_pairs((row.spec, row.measured) for row in rows)
    assert pair.ours.steps == pair.peer.steps == 6
    assert f"geometric mean {pair.ratio:.3f} over 1 pairs" in done.stdout


def test_the_peers_turn_differs_in_its_engine_alone(tmp_path: Path) -> None:
    [entry] = read_matrix(_matrix(tmp_path / "m.json"))
    ours, peer, again, last = pair_entries(entry, Engine.FSDP2)
    assert (ours, peer) == (last, again)
    assert peer.spec.plan is not None and entry.spec.plan is not None
    spread = {**entry.spec.plan["parallelism"], "engine": "fsdp2"}
    assert peer.spec.plan == {**entry.spec.plan, "parallelism": spread}


def test_a_matrix_of_another_engine_is_refused(tmp_path: Path) -> None:
    [entry] = read_matrix(_matrix(tmp_path / "m.json", engine="fsdp2"))
    with pytest.raises(ValueError, match="engine must be peakmark"):
        pair_entries(entry, Engine.FSDP2)


@pytest.mark.parametrize("tool", [record, bench_engines])
@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("{}", "schema is None")])
def test_a_matrix_that_cannot_be_read_is_one_sentence(
    tool: ModuleType,
    text: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    matrix = tmp_path / "m.json"
    if text is not None:
        matrix.write_text(text)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["tool", str(matrix), str(tmp_path / "out.jsonl")])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_nothing_whole_is_said_so() -> None:
    assert summary_lines([]) == ["No pair was whole."]
