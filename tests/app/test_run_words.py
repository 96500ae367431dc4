"""A run in a few words: what it predicted and, where it measured something, what that was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app import services
from app.commands.comparison import print_comparison
from db import repository
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


def test_a_run_without_a_training_plan_names_its_model_and_gpu(database_url: str) -> None:
    asked = {"model": {"preset": "meta-llama/Llama-3.2-1B"}, "batch": 1, "context": 64}
    spec = {"schema": 1, "kind": "decode", "world": "solo", "decode": asked}
    database = services.database()
    run_id = repository.create_run(database, spec, None, None, idempotency_key="d", who="test")
    held = claim_next_run(database, WorkerIdentity(host="here", pid=1, pid_start_ticks=1))
    assert held is not None
    environment = {"gpu": {"name": "NVIDIA H200"}}
    result = StoredResult(state=RunState.DONE, measured={}, environment=environment)
    store_result(database, held.lease, result)
    words = services.run_words({"id": run_id, "state": "done"})
    assert words["model"] == "meta-llama/Llama-3.2-1B"
    assert words["hardware"] == "NVIDIA H200"
    assert words["counter"] is None


def test_page_and_command_line_show_a_cpu_run_alike(
    database_url: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    """On the CPU the bytes of the training state compare, not the allocator's."""
    run_id = services.submit_proof(default_plan(), "cpu", "on-cpu")
    held = claim_next_run(
        services.database(), WorkerIdentity(host="here", pid=1, pid_start_ticks=1)
    )
    assert held is not None
    gib = 2**30
    state = {"parameter_bytes": gib, "gradient_bytes": 2 * gib, "optimizer_bytes": 4 * gib}
    result = StoredResult(
        state=RunState.DONE, measured={"state": state, "allocated_bytes": None}, environment={}
    )
    store_result(services.database(), held.lease, result)
    words = services.run_words({"id": run_id, "state": "done"})
    assert (words["counter"], words["measured_bytes"]) == ("state", 7 * gib)
    code, out, _ = run("runs", "--limit", "1")
    assert code == 0
    assert "state" in out and "7.00 GiB" in out
