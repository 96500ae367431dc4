"""The largest that fits is the last that fits: the next one does not."""

from __future__ import annotations

from typing import Any

import pytest

from planner import reach
from planner.errors import PlanError
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.reach import (
    TOKENS_STEP,
    bisect_largest,
    largest_near,
    largest_that_fits,
    largest_that_runs,
)
from planner.verdict import State


def plan_of(**parts: Any) -> Plan:
    model = {"preset": parts.pop("model", "llama-3.2-1b")}
    return parse_plan({"model": model, "hardware": {"preset": "h200"}, **parts})


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 100])
@pytest.mark.parametrize("most", [1, 64, 100, 1000])
def test_bisection_finds_the_last_that_fits(largest: int, most: int) -> None:
    assert bisect_largest(lambda number: number <= largest, most) == min(largest, most)
    for guess in (0, 1, 2, 5, min(largest, most), most):
        found = largest_near(lambda number: number <= largest, min(guess, most), most)
        assert found == min(largest, most)


@pytest.mark.parametrize(
    ("name", "part", "step"),
    [("micro_batch", "workload", 1), ("sequence_length", "workload", TOKENS_STEP)],
)
def test_the_next_one_does_not_fit(name: str, part: str, step: int) -> None:
    plan = plan_of()
    found = largest_that_fits(plan, name)
    assert found.value is not None

    def at(value: int) -> Any:
        document = plan.to_dict()
        document[part] = {**document[part], name: value}
        return predict(parse_plan(document))

    assert at(found.value).verdict.state is State.FITS
    assert at(found.value).memory["device_bytes"] == found.device_bytes
    assert at(found.value + step).verdict.state is not State.FITS
    assert found.stopped_by == at(found.value + step).verdict.sentence
    assert f"{found.value:,}" in found.sentence()


@pytest.mark.parametrize("near", [None, 3, 1000])
def test_what_runs_at_all_goes_to_the_end_of_memory(near: int | None) -> None:
    plan = plan_of(
        model="qwen2.5-0.5b", workload={"sequence_length": 4096, "checkpointing": "none"}
    )
    found = largest_that_runs(plan, "micro_batch", near)
    assert found is not None

    def device_bytes(rows: int) -> int:
        workload = {**plan.to_dict()["workload"], "micro_batch": rows}
        return int(
            predict(parse_plan({**plan.to_dict(), "workload": workload})).memory["device_bytes"]
        )

    assert device_bytes(found) <= plan.hardware.visible_bytes < device_bytes(found + 1)
    assert found >= (largest_that_fits(plan, "micro_batch").value or 0)


def test_nothing_may_run() -> None:
    plan = plan_of(model="llama-3.1-70b", parallelism={"world_size": 1})
    assert largest_that_runs(plan, "micro_batch", None) is None


def test_the_largest_model_is_in_layers_and_parameters() -> None:
    plan = plan_of()
    found = largest_that_fits(plan, "num_layers")
    assert found.value is not None and found.value > plan.model.num_layers
    document = plan.to_dict()
    overrides = {"num_hidden_layers": found.value}
    larger = parse_plan({**document, "model": {**document["model"], "overrides": overrides}})
    assert found.parameters == larger.model.parameters
    assert predict(larger).verdict.state is State.FITS


@pytest.mark.parametrize("parallelism", [{}, {"world_size": 64, "zero_stage": 3}])
def test_few_depths_are_replayed_on_the_way_to_hundreds_of_layers(
    parallelism: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = []

    def counted(plan: Plan, segment_share: float | None = None) -> Any:
        if segment_share is None:
            replayed.append(plan.model.num_layers)
        return predict(plan, segment_share=segment_share)

    monkeypatch.setattr(reach, "predict", counted)
    found = largest_that_fits(plan_of(model="qwen2.5-0.5b", parallelism=parallelism), "num_layers")
    assert found.value is not None and found.value > 400
    # The plan itself, the answer and the next one, and what lies on the way from 24 layers.
    assert len(set(replayed)) <= 6


def test_what_is_refused_ends_the_search_too() -> None:
    plan = plan_of(model="gpt2", workload={"sequence_length": 128})
    found = largest_that_fits(plan, "sequence_length")
    assert found.value == 1024
    assert "at most 1024" in found.stopped_by


def test_nothing_may_fit() -> None:
    plan = plan_of(model="llama-3.1-70b", parallelism={"world_size": 1})
    found = largest_that_fits(plan, "micro_batch")
    assert (found.value, found.device_bytes) == (None, None)
    assert found.sentence().startswith("No micro-batch fits. The smallest: needs ")


def test_a_serving_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="train"):
        largest_that_fits(plan_of(job="serve"), "micro_batch")
