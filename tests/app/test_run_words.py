"""A run in a few words: what it predicted and, where it measured something, what that was."""

from __future__ import annotations

import pytest

from app import services
from app.commands.comparison import print_comparison
from db.measurements import StoredResult, store_result
from db.queue import WorkerIdentity, claim_next_run
from db.types import RunState
from planner.plan import default_plan


def test_a_run_that_measured_nothing_keeps_its_prediction(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = default_plan()
    run_id = services.submit_proof(plan, "cpu", "fails")
    held = claim_next_run(
        services.database(), WorkerIdentity(host="here", pid=1, pid_start_ticks=1)
    )
    assert held is not None
    store_result(
        services.database(),
        held.lease,
        StoredResult(state=RunState.FAILED, measured={}, environment={}),
    )
    words = services.run_words({"id": run_id, "state": "failed"})
    prediction = services.prediction_of(plan)
    assert words["predicted_bytes"] == prediction["memory"]["allocated_bytes"]
    assert words["measured_bytes"] is None
    print_comparison(prediction, {}, "cpu")
    assert capsys.readouterr().out == ""
