"""docs/quality.md says what the recorded probes give."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from planner.records import Kind, RecordedRow, Role

EXACT = {"kl_mean": 0.0, "max_abs": 0.0, "same_choice": 1.0, "perplexity": 7.5}
MEASURED = {
    "models": {
        "recall": {
            "exact": {**EXACT, "accuracy": 0.95, "near": 0.96, "far": 0.94},
            "floor": 1e-6,
            "positions": 2048,
            "settings": {"window": 16, "kv_heads": 1},
            "changes": {
                "paged": {**EXACT, "near": 0.96, "far": 0.94},
                "window": {**EXACT, "max_abs": 3.0, "near": 0.9, "far": 0.125},
            },
            "chance": 0.125,
            "length": 64,
            "steps": 600,
        }
    }
}


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts/write_quality_doc.py"
    spec = importlib.util.spec_from_file_location("write_quality_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quality_document_is_up_to_date(script: Any) -> None:
    text = script.DOCUMENT.read_text()
    assert script.render(text, script.recorded_rows(script.ROOT)) == text, "run `make accuracy`"


def test_system_and_algorithm_stand_apart(script: Any) -> None:
    row = RecordedRow(
        id="0" * 16,
        kind=Kind.QUALITY,
        recorded_at=datetime(2026, 1, 1, tzinfo=UTC),
        role=Role.EVIDENCE,
        spec={"quality": {}},
        outcome="done",
        measured=MEASURED,
        environment={"gpu": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}},
    )
    lines = "\n".join(script.measured_part([row]))
    system, algorithm = lines.split("Algorithm variables")
    assert "### NVIDIA H200, torch 2.11.0, model in bf16" in system
    assert (
        "| paged cache | system | 0 | 0 | 100.0 % | 7.5 | 96 % | 94 % | - | no change |" in system
    )
    assert "sliding window | algorithm" in algorithm and "12 % | - | another model |" in algorithm
    assert "90 % of what it can see and 12 % of what lies farther back" in system
    # The exact row heads both tables.
    assert lines.count("| exact |") == 2
