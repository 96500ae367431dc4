"""A plan is queued once, its run is seen, and what it measured stands beside its prediction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from app import plan_curves, proof, services
from app.measured import accuracy, measurement_detail
from db.measurements import StoredResult, measurements, store_result
from db.queue import WorkerIdentity, claim_next_run
from db.types import RunState
from planner.errors import PlanError
from planner.plan import Plan, default_plan
from tests.app.drawn import broken, charts, texts

Opened = Callable[..., AppTest]


def test_proving_twice_with_one_key_queues_one_run(opened: Opened, tiny_config: str) -> None:
    app = opened(source="config", gpus="1")
    app.text_area(key="config_text").set_value(tiny_config).run()
    app.number_input(key="seq").set_value(64).run()
    app.button(key="prove").click().run()
    assert not app.exception and not app.error
    lines = services.run_lines()
    assert [line["world"] for line in lines] == ["cpu"]
    assert "No worker is alive" in texts(app)
    key = app.session_state["proof_key"]
    plan = services.check_plan(services.run_detail(lines[0]["id"])["plan"])  # type: ignore[index]
    first = services.submit_proof(plan, "cpu", key)
    assert services.submit_proof(plan, "cpu", key) == first
    assert len(services.run_lines()) == 2


def test_a_queued_run_can_be_seen_and_cancelled(opened: Opened) -> None:
    plan = proof.small_proof(default_plan())
    run_id = services.submit_proof(plan, "cpu", "key-1")
    app = opened(run=run_id)
    app.switch_page("app_pages/run.py").run()
    assert not app.exception and not app.error
    assert "queued" in texts(app)
    app.button(key=f"cancel_{run_id}").click().run()
    assert str(services.run_lines()[0]["state"]) == "cancelled"
    app.switch_page("app_pages/runs.py").run()
    assert not broken(app)
    assert app.dataframe[0].value.iloc[0]["state"] == "cancelled"


def test_a_big_plan_is_not_proved_on_the_cpu_but_a_small_one_is_offered(opened: Opened) -> None:
    app = opened(model="meta-llama/Llama-3.1-405B")
    assert app.button(key="prove").disabled
    assert "Too big for the CPU world" in texts(app)
    app.button(key="prove_small").click().run()
    assert not app.exception and not app.error
    assert services.run_lines()[0]["model_name"] == "small llama"


def test_what_needs_a_gpu_is_not_proved_on_the_cpu(opened: Opened) -> None:
    app = opened(attention="triton")
    assert app.button(key="prove").disabled
    assert "workload.attention is 'triton': its kernels need a GPU" in texts(app)
    assert "prove_small" not in [button.key for button in app.button]


@pytest.mark.parametrize("preset", services.model_ids())
def test_every_preset_has_a_small_proof(preset: str) -> None:
    attention = "eager" if "gemma" in preset or "gpt-oss" in preset else "sdpa"
    document = {
        "model": {"preset": preset},
        "workload": {"sequence_length": 512, "attention": attention},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    try:
        plan = services.check_plan(document)
    except PlanError as problem:
        pytest.skip(str(problem))
    small = proof.small_proof(plan)
    # Layers with and without a window, or dense ones and experts, need both kinds.
    differ = {"gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3"}
    assert small.model.num_layers == (3 if small.model.family in differ else 2)
    # At 16 bytes each, the states of two ranks take under 0.2 GB.
    assert small.model.parameters < 12_000_000
    assert small.parallelism.world_size == 2


def finished(plan: Plan, result: StoredResult) -> str:
    """Queue a run of `plan` on one GPU and end it with `result`, as a worker would."""
    run_id = services.submit_proof(plan, "solo", result.state)
    held = claim_next_run(
        services.database(), WorkerIdentity(host="here", pid=1, pid_start_ticks=1)
    )
    assert held is not None
    store_result(services.database(), held.lease, result)
    return run_id


def test_a_measured_run_stands_beside_its_prediction(opened: Opened) -> None:
    memory = services.prediction_of(default_plan())["memory"]
    before = accuracy()["rows"]["evidence"]
    peak = {"peak_allocated_bytes": 40 * 2**30, "end_allocated_bytes": 0}
    measured = {
        "allocated_bytes": 40 * 2**30,
        "reserved_bytes": 44 * 2**30,
        "device_bytes": 45 * 2**30,
        "phases": {"forward": peak, "backward": peak, "optimizer": peak},
    }
    result = StoredResult(
        state=RunState.DONE, measured=measured, environment={"gpu": {"name": "H200"}}
    )
    run_id = finished(default_plan(), result)
    app = opened(run=run_id)
    app.switch_page("app_pages/run.py").run()
    assert not broken(app) and not app.error
    predicted, seen = charts(app)[0]["data"]
    assert (predicted["name"], seen["name"]) == ("predicted", "measured")
    assert list(seen["x"]) == [40, 44, 45]
    assert predicted["x"][0] * 2**30 == pytest.approx(memory["allocated_bytes"])
    app.switch_page("app_pages/accuracy.py").run()
    assert not broken(app)
    assert f"{before + 1} measurements as evidence" in texts(app)
    assert "step time" in app.get_by_key("accuracy_quantity").options
    assert "groups (" in texts(app) and "Is the predicted best the best?" in texts(app)


def test_running_out_of_memory_is_a_result_with_the_allocators_numbers(opened: Opened) -> None:
    error = {"type": "OutOfMemoryError", "message": "tried 8 GiB", "requested_bytes": 8 * 2**30}
    run_id = finished(
        default_plan(),
        StoredResult(state=RunState.OOM_DEVICE, measured={}, environment={}, error=error),
    )
    app = opened(run=run_id)
    app.switch_page("app_pages/run.py").run()
    assert not broken(app)
    assert {metric.label: metric.value for metric in app.metric}["requested"] == "8.00 GiB"
    assert "**refutes** the prediction" in texts(app)
    accuracy()  # predicted beside the pages; until then one only says how far it is
    app.switch_page("app_pages/accuracy.py").run()
    assert "False “fits”: " in app.error[0].value


def test_a_recorded_measurement_opens_as_a_run_does(opened: Opened) -> None:
    recorded = next(
        seen
        for seen in measurements(services.database())
        if seen.measured.get("allocated_bytes") and seen.run_id is None
    )
    app = opened(row=recorded.id)
    app.switch_page("app_pages/run.py").run()
    assert not broken(app) and not app.error
    assert "recorded elsewhere" in texts(app) and recorded.id in texts(app)
    predicted, seen = charts(app)[0]["data"]
    assert seen["x"][0] * 2**30 == pytest.approx(recorded.measured["allocated_bytes"])
    assert predicted["name"] == "predicted"


def test_a_measurement_that_is_not_there_is_told(opened: Opened) -> None:
    app = opened(row="0" * 16)
    app.switch_page("app_pages/run.py").run()
    assert not broken(app)
    assert "There is no measurement" in app.warning[0].value


def test_a_measurement_of_a_run_here_leads_to_that_run(opened: Opened) -> None:
    measured = {"allocated_bytes": 1, "reserved_bytes": 1, "device_bytes": 1, "phases": {}}
    run_id = finished(
        default_plan(), StoredResult(state=RunState.DONE, measured=measured, environment={})
    )
    row_id = next(seen.id for seen in measurements(services.database()) if seen.run_id == run_id)
    detail = measurement_detail(row_id)
    assert detail is not None and detail["run_id"] == run_id
    names = accuracy()["names"]
    assert names[row_id].startswith("Llama-3.1-8B: peakmark ZeRO-3 × 8")


def test_a_runs_timeline_lies_over_the_predicted_one(opened: Opened) -> None:
    plan = default_plan()
    sections = plan_curves.timeline_of(plan.to_dict())["sections"]
    assert (
        max(section["high_bytes"] for section in sections)
        == (services.prediction_of(plan)["memory"]["allocated_bytes"])
    )
    # Measured a MiB lower throughout, but 2 MiB in the loss.
    less = {"loss": 2 * 2**20}
    measured = {
        "allocated_bytes": 2**30,
        "reserved_bytes": 2**30,
        "device_bytes": 2**30,
        "phases": {},
        "timeline": [
            [s["label"], s["end_bytes"], s["high_bytes"] - less.get(s["label"], 2**20)]
            for s in sections
        ],
    }
    result = StoredResult(state=RunState.DONE, measured=measured, environment={})
    app = opened(run=finished(plan, result))
    app.switch_page("app_pages/run.py").run()
    assert not broken(app)
    names = [trace.get("name") for trace in charts(app)[-1]["data"]]  # type: ignore[attr-defined]
    assert {"predicted", "measured", "activations"} <= set(names)
    assert "furthest apart in logits and loss: predicted 2.00 MiB above measured" in texts(app)


def test_a_run_without_a_timeline_shows_the_predicted_one(opened: Opened) -> None:
    measured = {"allocated_bytes": 2**30, "phases": {}}
    result = StoredResult(state=RunState.DONE, measured=measured, environment={})
    app = opened(run=finished(default_plan(), result))
    app.switch_page("app_pages/run.py").run()
    assert not broken(app)
    assert "This run recorded no timeline." in texts(app)
