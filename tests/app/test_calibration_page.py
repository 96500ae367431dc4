"""The Run page of a calibration: the best of each operation beside the vendor's sheet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamlit.testing.v1 import AppTest

from app import services
from db import queue
from db.measurements import StoredResult, store_result
from db.queue import WorkerIdentity
from db.repository import create_run
from db.types import RunState

Opened = Callable[..., AppTest]


def test_a_calibration_s_page_shows_rates_and_the_sheet(opened: Opened) -> None:
    spec: dict[str, Any] = {
        "schema": 1,
        "kind": "calibrate",
        "world": "nccl",
        "calibration": {"world_size": 1, "budget_s": 9.0},
    }
    point = {"shape": [4, 4, 4], "dtype": "bf16", "bytes": 96, "n": 5, "time_s": 1.0}
    measured = {
        "curves": [{**point, "operation": "matmul_nt", "flops": 6e14}],
        "left_out": ["copy [8]"],
        "duration_s": 9.0,
    }
    gpu = {"name": "NVIDIA H200", "total_bytes": 150109880320, "memory_total_bytes": 150754820096}
    database = services.database()
    run_id = create_run(database, spec, None, None, idempotency_key="calibration")
    worker = WorkerIdentity(host="here", pid=1, pid_start_ticks=1)
    held = queue.claim_next_run(database, worker)
    assert held is not None and held.lease.run_id == run_id
    result = StoredResult(state=RunState.DONE, measured=measured, environment={"gpu": gpu})
    store_result(database, held.lease, result)

    app = opened(run=run_id)
    app.switch_page("app_pages/run.py").run()
    assert not app.exception and not app.error
    table = next(frame.value for frame in app.dataframe if "vendor sheet" in frame.value)
    # 600 of the 989 TFLOP/s.
    assert list(table.iloc[0]) == [
        *("matmul nt", "bf16", "4 x 4 x 4", "600.0 TFLOP/s", "989.0 TFLOP/s", "61 %", "1")
    ]
    assert [metric.label for metric in app.metric] == ["Points measured", "Time", "Left out"]
    app.switch_page("app_pages/runs.py").run()
    assert not app.exception


def test_the_hardware_page_shows_what_was_calibrated_elsewhere(opened: Opened) -> None:
    app = opened()
    app.switch_page("app_pages/hardware.py").run()
    assert not app.exception and not app.error
    choice = app.selectbox(key="calibration")
    names = choice.options
    assert any(name.startswith("1 x NVIDIA H200, world nccl") for name in names)
    assert any(name.startswith("2 x NVIDIA H200, world nccl") for name in names)
    two = next(name for name in names if name.startswith("2 x"))
    choice.select(names.index(two)).run()
    table = next(frame.value for frame in app.dataframe if "vendor sheet" in frame.value)
    assert {"all gather", "all reduce", "reduce scatter"} <= set(table["operation"])
    assert f"{two}, recorded elsewhere" in "\n".join(str(c.value) for c in app.caption)
