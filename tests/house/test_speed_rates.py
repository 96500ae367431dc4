"""planner/speed/h200.json holds what recorded/ says was measured, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "h200-calibrate.jsonl",
    *(
        f"speed/h200-{name}.jsonl"
        for name in ("host", "kinds", "dtypes", "offload", "pace", "products")
    ),
)


def test_the_shipped_rates_are_those_that_were_recorded() -> None:
    spec = importlib.util.spec_from_file_location(
        "write_speed_rates", ROOT / "scripts/write_speed_rates.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.render(ROOT / "recorded" / name for name in FILES)
    assert written == (ROOT / "planner/speed/h200.json").read_text()
