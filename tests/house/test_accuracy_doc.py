"""docs/accuracy.md says what the planner and the recorded rows of this commit give."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from planner.accuracy import accuracy_report


def test_the_accuracy_document_is_up_to_date(root: Path) -> None:
    path = root / "scripts/write_accuracy_doc.py"
    spec = importlib.util.spec_from_file_location("write_accuracy_doc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bounds = json.loads((root / "recorded/bounds.json").read_text())
    report = accuracy_report(module.recorded_rows(root / "recorded"))
    text = (root / "docs/accuracy.md").read_text()
    assert text == module.render(report, bounds), "run `make accuracy`"
