"""docs/zero.md says what the planner and the recorded rows of this commit give."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.accuracy import AccuracyReport, merged_reports


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts/write_zero_doc.py"
    spec = importlib.util.spec_from_file_location("write_zero_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass with postponed annotations looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "write_zero_doc", module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def groups(script: Any, recorded_reports: Callable[[], Mapping[str, AccuracyReport]]) -> Any:
    return script.gather(script.ROOT, merged_reports(recorded_reports().values()))


def test_the_zero_document_is_up_to_date(script: Any, groups: Any) -> None:
    text = script.render(groups, script.recorded_rows(script.ROOT))
    assert script.DOCUMENT.read_text() == text, "run `make accuracy`"


def test_parts_of_a_row_sum_to_its_prediction(groups: Any) -> None:
    for points in groups.values():
        for point in points:
            assert sum(point.parts.values()) == round(point.predicted_bytes)
