"""The recorder: matrix in, rows out, resumable."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import runners.record
from planner.plan import parse_plan
from planner.records import Role, parse_row, read_file
from runners.contract import JobKind, JobResult, Outcome
from runners.record import Recorder, make_row, read_matrix, recorded_keys

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / "recorded" / "matrices" / "main_job.json"
SHAPE = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "sequence_length": 8}


def _write_matrix(path: Path, runs: list[dict]) -> Path:
    defaults = {
        "attention": {
            "world": "cpu",
            "attention": {**SHAPE, "causal": True, "dtype": "fp32", "kernels": ["sdpa"]},
        }
    }
    path.write_text(json.dumps({"schema": 1, "defaults": defaults, "runs": runs}))
    return path


def test_the_committed_matrix_covers_what_the_main_job_promises() -> None:
    entries = read_matrix(MATRIX)
    assert len({entry.key for entry in entries}) == len(entries)
    plans = [parse_plan(e.spec.plan) for e in entries if e.spec.kind is JobKind.TRAIN_STEP]
    assert len(plans) >= 40
    assert len({plan.model.family for plan in plans}) >= 3
    shapes = {
        (p.workload.attention, p.workload.checkpointing, p.parallelism.zero_stage) for p in plans
    }
    assert {attention for attention, _, _ in shapes} == {"eager", "sdpa", "triton"}
    assert {checkpointing for _, checkpointing, _ in shapes} == {"none", "full"}
    assert {stage for _, _, stage in shapes} == {0, 1, 2, 3}
    assert {p.parallelism.world_size for p in plans} == {1, 8, 64}
    assert {p.parallelism.engine for p in plans} == {"peakmark", "fsdp2"}
    attention = [e.spec.attention for e in entries if e.spec.attention]
    assert {a["head_dim"] for a in attention} == {64, 128}
    assert max(a["sequence_length"] for a in attention) == 32768


def test_a_run_is_laid_over_its_defaults(tmp_path: Path) -> None:
    runs = [{"kind": "attention", "role": "calibration", "attention": {"head_dim": 16}}]
    [entry] = read_matrix(_write_matrix(tmp_path / "m.json", runs))
    assert entry.role is Role.CALIBRATION
    assert entry.spec.attention == {
        **SHAPE, "head_dim": 16, "causal": True, "dtype": "fp32", "kernels": ["sdpa"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ({"kind": "generate", "world": "cpu"}, "m.json: run 1: 'generate' is not a valid JobKind"),
        ({"kind": "attention", "colour": 1}, "run 1: job spec has unknown fields: colour"),
        (
            {"kind": "train_step", "world": "cpu", "plan": {"parallelism": {"world_size": 99}}},
            "run 1: the world cpu starts every rank on this machine: world_size is 99",
        ),
    ],
)
def test_a_bad_run_is_named(tmp_path: Path, run: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_matrix(_write_matrix(tmp_path / "m.json", [run]))


def test_an_out_of_memory_row_keeps_the_allocators_numbers(tmp_path: Path) -> None:
    [entry] = read_matrix(_write_matrix(tmp_path / "m.json", [{"kind": "attention"}]))
    error = {"type": "OutOfMemoryError", "requested_bytes": 3}
    result = JobResult(outcome=Outcome.OOM_DEVICE, measured={"phases": {}}, error=error)
    row = make_row(entry, result, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    parsed = parse_row(row)
    assert parsed.outcome == "oom_device"
    assert parsed.measured == {"phases": {}, "error": error}
    assert row["recorded_at"] == "2026-01-02T03:04:05Z"


def test_runs_become_rows_and_are_not_repeated(tmp_path: Path) -> None:
    runs = [{"kind": "attention"}, {"kind": "attention", "attention": {"heads": 0}}]
    entries = read_matrix(_write_matrix(tmp_path / "m.json", runs))
    out = tmp_path / "rows.jsonl"
    recorder = Recorder(out, tmp_path / "work", budget_s=200.0)
    recorder.run(entries)
    assert recorder.counts == {"done": 1, "failed": 1, "not_run": 0}
    [row] = read_file(out)
    assert row.measured["kernels"]["sdpa"]["outcome"] == "done"
    assert recorded_keys(out) == {entries[0].key}


@pytest.mark.slow
def test_a_run_of_two_ranks_is_recorded(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    plan = {
        "schema": 1,
        "job": "train",
        "model": {"config": config, "name": "tiny"},
        "workload": {"sequence_length": 8},
        "parallelism": {"zero_stage": 1, "world_size": 2},
        "hardware": {"preset": "h200"},
    }
    run = {"kind": "train_step", "world": "cpu", "steps": 1, "plan": plan}
    out = tmp_path / "rows.jsonl"
    recorder = Recorder(out, tmp_path / "work", budget_s=200.0)
    recorder.run(read_matrix(_write_matrix(tmp_path / "m.json", [run])))
    assert recorder.counts == {"done": 1, "not_run": 0}
    [row] = read_file(out)
    assert [rank["rank"] for rank in row.measured["per_rank"]] == [0, 1]


def test_the_budget_ends_what_runs_and_counts_the_rest(tmp_path: Path) -> None:
    entries = read_matrix(_write_matrix(tmp_path / "m.json", [{"kind": "attention"}] * 5))
    recorder = Recorder(tmp_path / "rows.jsonl", tmp_path / "work", budget_s=0.3)
    recorder.run(entries)
    assert recorder.counts == {"not_run": 5}


def test_entries_describe_themselves() -> None:
    labels = [entry.label for entry in read_matrix(MATRIX)]
    assert "Qwen/Qwen2.5-0.5B" in labels[0]
    assert "sequence_length=8192" in labels[-1]


@pytest.mark.parametrize(("ahead", "most"), [(0, 1), (3, 4)])
def test_as_many_processes_start_ahead_as_asked(
    ahead: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Run:
        """Ends once as many run as may, and leaves nothing."""

        def __init__(self, entry: object, directory: Path) -> None:
            self.entry = entry

        def is_over(self) -> bool:
            seen.append(len(recorder._active))
            return True

        def is_late(self) -> bool:
            return False

        def stop(self) -> None:
            pass

        def result(self) -> None:
            return None

        def log_tail(self) -> str:
            return ""

    monkeypatch.setattr(runners.record, "_Run", Run)
    matrix = _write_matrix(tmp_path / "m.json", [{"kind": "attention"}] * 5)
    recorder = Recorder(tmp_path / "rows.jsonl", tmp_path, budget_s=60.0, ahead=ahead)
    recorder.run(read_matrix(matrix))
    assert max(seen) == most
    assert recorder.counts == {Outcome.CRASHED: 5, "not_run": 0}
