"""docs/serving.md says what the recorded rows and the planner of this commit give."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts/write_serving_doc.py"
    spec = importlib.util.spec_from_file_location("write_serving_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass with postponed annotations looks its module up by name.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "write_serving_doc", module)
        spec.loader.exec_module(module)
    return module


def test_the_serving_document_is_up_to_date(script: Any) -> None:
    text = script.DOCUMENT.read_text()
    assert script.render(text, script.recorded_rows(script.ROOT)) == text, "run `make accuracy`"


def test_every_recorded_row_has_its_line(script: Any) -> None:
    rows = script.recorded_rows(script.ROOT)
    lines = list(script.measured_part(rows))
    kinds = [row.kind.value for row in rows]
    assert sum("static over ours" in line for line in lines) == 1
    measured = [line for line in lines if line.startswith("| ") and " ms |" in line]
    # A decode run has one line, a served trace one for first tokens and one for the rest, and one for each peer.
    peers = sum("latency" in one for row in rows for one in row.measured.get("peers", {}).values())
    assert len(measured) == kinds.count("decode") + 2 * kinds.count("serve") + peers


def test_a_document_without_its_marks_is_not_touched(script: Any) -> None:
    with pytest.raises(ValueError, match="must hold the line"):
        script.render("# Serving\n", [])
