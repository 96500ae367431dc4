"""README.md's errors are those of docs/accuracy.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TABLES = """# Accuracy

## All rows but those of calibration

| quantity | n | mean | mean absolute | p90 | worst |
|---|--:|--:|--:|--:|--:|
| allocated | 30 | -0.00 % | 0.01 % | 0.02 % | -0.16 % |
| reserved | 20 | -0.02 % | 0.04 % | 0.03 % | -4.39 % |
| device | 10 | -0.04 % | 0.07 % | 0.21 % | +3.68 % |
| step_time | 5 | -3.70 % | 11.00 % | 25.42 % | +71.05 % |

## Rows held out

| quantity | n | mean | mean absolute | p90 | worst |
|---|--:|--:|--:|--:|--:|
| allocated | 3 | -0.00 % | 0.02 % | 0.01 % | +0.15 % |
| reserved | 2 | -0.03 % | 0.05 % | 0.05 % | -2.39 % |
| device | 1 | -0.04 % | 0.06 % | 0.20 % | -1.69 % |

## Verdicts

| verdict | ran | ran out of memory |
|---|--:|--:|
| fits | 25 | 0 |
| does not fit | 1 | 4 |
"""
PARAGRAPH = (
    "Against 30 recorded H200 training steps predicted bytes err, on average and at worst, by 0.01 % and "
    "0.16 % (allocated), 0.04 % and 4.39 % (reserved), 0.07 % and 3.68 % (device); in the 3 that were held "
    "out, chosen before and used for nothing, by 0.02 % and 0.15 % (allocated), 0.05 % and 2.39 % "
    '(reserved), 0.06 % and 1.69 % (device). Of the plans called "fits" none ran out of memory, of the 5 '
    'called "does not fit" 4 did. **Speed is not there yet**: a step\'s time errs by 11.00 % on average '
    "and by up to 71.05 % (5 steps of ranks that were all real)."
)


@pytest.fixture(scope="module")
def script(root: Path) -> Any:
    path = root / "scripts/write_readme_figures.py"
    spec = importlib.util.spec_from_file_location("write_readme_figures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_says_what_the_accuracy_document_says(script: Any) -> None:
    readme = script.README.read_text()
    assert script.rewritten(readme, script.ACCURACY.read_text()) == readme, "run `make accuracy`"


def test_figures_come_from_the_tables(script: Any) -> None:
    assert " ".join(script.paragraph(TABLES).split()) == PARAGRAPH


def test_a_readme_without_the_paragraph_is_told(script: Any) -> None:
    with pytest.raises(ValueError, match="begins with 'Against'"):
        script.rewritten("# Peakmark\n", TABLES)
