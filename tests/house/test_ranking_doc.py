"""docs/ranking.md says what the planner and the recorded rows of this commit give."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from planner.accuracy import AccuracyReport, merged_reports
from planner.ranking import ranking_report

ROOT = Path(__file__).resolve().parents[2]


def test_the_ranking_document_is_up_to_date(
    recorded_reports: Callable[[], Mapping[str, AccuracyReport]],
) -> None:
    path = ROOT / "scripts/write_ranking_doc.py"
    spec = importlib.util.spec_from_file_location("write_ranking_doc", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    residuals = merged_reports(recorded_reports().values()).residuals
    text = script.render(ranking_report(script.recorded_rows(ROOT), residuals))
    assert script.DOCUMENT.read_text() == text, "run `make accuracy`"
