"""planner/speed/h200.json holds what recorded/ says was measured, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from planner.records import Kind, Role, read_file

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


def test_no_run_that_is_held_out_set_the_usual_host_s_pace() -> None:
    lines = (ROOT / "recorded/speed/h200-pace.jsonl").read_text().splitlines()[1:]
    used = {round(1e6 * json.loads(line)["time_s"], 6) for line in lines}
    rows = [row for path in (ROOT / "recorded").glob("*.jsonl") for row in read_file(path)]
    seen: dict[Role, set[float]] = {role: set() for role in Role}
    for row in rows:
        if row.kind is Kind.TRAIN_STEP:
            for rank in row.measured.get("host_pace") or ():
                seen[row.role] |= {round(rank[name], 6) for name in ("forward_us", "backward_us")}
    assert used and used <= seen[Role.EVIDENCE]
    assert not used & seen[Role.HOLDOUT]
