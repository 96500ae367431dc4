"""docs/accuracy.md says what the planner and the recorded rows of this commit give."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.accuracy import AccuracyReport, merged_reports
from planner.records import RecordedRow


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts/write_accuracy_doc.py"
    spec = importlib.util.spec_from_file_location("write_accuracy_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass with postponed annotations looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "write_accuracy_doc", module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sources(script: Any, recorded_reports: Callable[[], Mapping[str, AccuracyReport]]) -> Any:
    def report(rows: Iterable[RecordedRow]) -> AccuracyReport:
        return merged_reports(recorded_reports()[row.id] for row in rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "accuracy_report", report)
        return script.gather(script.ROOT)


def test_the_accuracy_document_is_up_to_date(script: Any, sources: Any) -> None:
    assert script.DOCUMENT.read_text() == script.render(sources), "run `make accuracy`"


def test_the_history_behind_verdicts_is_up_to_date(script: Any, sources: Any) -> None:
    assert script.HISTORY.read_text() == script.history_text(sources.history), "run `make accuracy`"


def test_every_public_case_says_what_is_open(sources: Any) -> None:
    for answer in sources.cases.answers():
        assert answer.case.note.endswith("."), answer.case.id
        assert answer.refusal or answer.predicted_bytes
