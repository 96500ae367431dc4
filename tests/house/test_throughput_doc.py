"""docs/throughput.md says what the planner and the recorded rows of this commit give."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.accuracy import AccuracyReport, merged_reports
from planner.public_speed import public_speeds

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    path = ROOT / "scripts/write_throughput_doc.py"
    spec = importlib.util.spec_from_file_location("write_throughput_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_throughput_document_is_up_to_date(
    script: Any, recorded_reports: Callable[[], Mapping[str, AccuracyReport]]
) -> None:
    report = merged_reports(recorded_reports().values())
    rows = script.recorded_rows(ROOT)
    text = script.render(rows, report)
    assert script.DOCUMENT.read_text() == text, "run `make accuracy`"
    assert script.HISTORY.read_text() == script.history_text(rows, report), "run `make accuracy`"


def test_every_step_far_off_whose_gpu_sets_the_pace_says_why(
    script: Any, recorded_reports: Callable[[], Mapping[str, AccuracyReport]]
) -> None:
    rows = script.recorded_rows(ROOT)
    timed = script.timed_of(merged_reports(recorded_reports().values()))
    far = script.far_off(rows, timed, script.paces_of(rows, timed))
    assert {r.row_id for r in far} <= set(script.EXPLAINED)


def test_every_published_time_says_what_the_report_did_otherwise(script: Any) -> None:
    cases = public_speeds(script.PUBLIC)
    assert len(cases) >= 15
    assert all(case.note for case in cases)
    # 16 rows of 8,192 tokens on eight GPUs at 5,762 tokens a second each: 2.84 s.
    assert cases[0].published_s == pytest.approx(2 * 8192 / 5762)
