"""The Run page of a decode run: our figures beside transformers'."""

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
from planner.decode_run import parse_decode

Opened = Callable[..., AppTest]


def test_a_decode_run_s_page_shows_times_beside_transformers(opened: Opened) -> None:
    run, _ = parse_decode({"model": {"preset": "llama-3.2-1b"}, "batch": 16})
    spec = {"schema": 1, "kind": "decode", "world": "solo", "decode": run.to_dict()}
    times: dict[str, Any] = {"prefill_time_s": 0.1, "tokens_per_s": 16000.0, "decode_time_s": 0.001}
    peer = {**times, "decode_time_s": 0.004, "decode_time_over_ours": 4.0, "tokens_equal": 1.0}
    measured = {
        **times,
        "decode_statistics": {"median_s": 0.001, "p10_s": 0.0009, "p90_s": 0.0012, "n": 60},
        "cache_bytes": 2**29,
        "weights_bytes": 2**31,
        "allocated_bytes": 2**32,
        "attention_backend": "peakmark:hopper",
        "graphs": True,
        "peers": {"static": peer},
    }
    database = services.database()
    run_id = create_run(database, spec, None, None, idempotency_key="decode")
    worker = WorkerIdentity(host="here", pid=1, pid_start_ticks=1)
    held = queue.claim_next_run(database, worker)
    assert held is not None and held.lease.run_id == run_id
    result = StoredResult(state=RunState.DONE, measured=measured, environment={})
    store_result(database, held.lease, result)

    app = opened(run=run_id)
    app.switch_page("app_pages/run.py").run()
    assert not app.exception and not app.error
    table = next(frame.value for frame in app.dataframe if "per step" in frame.value)
    assert list(table["per step"]) == ["1 ms", "4 ms"]
    assert list(table["time over ours"]) == ["1.00", "4.00"]
    labels = [metric.label for metric in app.metric]
    assert labels == ["Time per step", "Tokens per second", "Prefill", "Key-value cache"]
