"""What `peakmark calibrate` measured here times the plans of that GPU, on the pages and in commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app import services
from app.own_calibration import calibration_of
from db.engine import open_database
from db.measurements import insert_measurement
from db.types import Origin, Role, RunKind, RunState
from db.views import Measurement
from planner.hardware import resolve_gpu
from planner.plan import parse_plan
from planner.records import row_id

PLAN = {
    "job": "train",
    "model": {"preset": "openai-community/gpt2"},
    "workload": {"sequence_length": 64},
    "parallelism": {"world_size": 1},
    "hardware": {"preset": "h200-sxm5-141gb"},
}


def keep(url: str, origin: Origin, time_s: float) -> None:
    """Keep a calibration of one point in the database."""
    spec = {"schema": 1, "kind": "calibrate", "world": "nccl", "calibration": {"world_size": 1}}
    point: dict[str, Any] = {"operation": "kernel_none", "shape": [1], "dtype": "fp32"}
    measured = {"curves": [{**point, "bytes": 8, "flops": 0.0, "time_s": time_s, "n": 5}]}
    gpu = {"name": "NVIDIA H200", "memory_total_bytes": 150_754_820_096}
    environment = {"gpu": gpu}
    seen = Measurement(
        id=row_id(spec, measured, environment), kind=RunKind.CALIBRATE, role=Role.CALIBRATION,
        recorded_at="2026-01-01T00:00:00Z", outcome=RunState.DONE, origin=origin,
        run_id=None, spec=spec, measured=measured, environment=environment,
    )  # fmt: skip
    database = open_database(url, recorded=None)
    with database.write() as session:
        insert_measurement(session, seen)
    database.close()


def test_only_what_was_measured_here_times_a_plan(database_url: str) -> None:
    gpu, path = resolve_gpu("h200"), Path(database_url.removeprefix("sqlite:///"))
    # Before the first start there is no database, and looking makes none.
    path.unlink()
    assert calibration_of(gpu) is None
    assert not path.exists()
    keep(database_url, Origin.RECORDED, 1e-6)
    assert calibration_of(gpu) is None
    keep(database_url, Origin.HERE, 2e-6)
    found = calibration_of(gpu)
    assert found is not None
    assert [curve.time_s for curve in found.curves] == [2e-6]
    source = services.prediction_of(parse_plan(PLAN))["throughput"]["source"]
    assert source == found.source == "curves measured here on H200 SXM5 141GB (2026-01-01)"
