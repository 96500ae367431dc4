"""Which counters of a run are compared with its prediction."""

from __future__ import annotations

from typing import Any

import pytest

from planner.comparison import compare, compare_paced
from planner.plan import default_plan, parse_plan
from planner.predict import predict
from planner.speed.calibrated import rates_of
from planner.speed.step import training_step
from planner.workload import TrainingWorkload

SEEN: dict[str, Any] = {"allocated_bytes": 10, "reserved_bytes": 20, "device_bytes": 30}


@pytest.mark.parametrize(
    ("seen", "quantities"),
    [
        (SEEN, ["allocated", "reserved", "device"]),
        # Segments given back by the end of the run: the device's figure is not what it needed.
        ({**SEEN, "device_bytes": 19}, ["allocated", "reserved"]),
        # Its optimizer's states were there first: the allocator's segments lie otherwise.
        ({**SEEN, "loaded": {"step": 7}}, ["allocated"]),
    ],
)
def test_only_what_the_prediction_is_of_is_compared(
    seen: dict[str, Any], quantities: list[str]
) -> None:
    prediction = predict(default_plan()).to_dict()
    found = compare(prediction, seen, "solo")
    assert [one.quantity for one in found] == quantities
    assert found[0].predicted == prediction["memory"]["allocated_bytes"]


def test_paced_steps_are_predicted_at_the_pace_that_their_run_measured() -> None:
    # A small model, whose host takes far longer than its GPU: three times the shipped reference forward,
    # by the slower of two ranks, and twice back.
    document = {
        "job": "train",
        "model": {"preset": "openai-community/gpt2"},
        "workload": {"sequence_length": 64, "optimizer": "sgd"},
        "parallelism": {"zero_stage": 0, "world_size": 2},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    plan = parse_plan(document)
    rates = rates_of(plan.hardware)
    forward_us, backward_us = (1e6 * seconds for seconds in rates.host.module_s)
    step = {"step_time_s": 0.2, "forward_us": 3 * forward_us, "backward_us": backward_us}
    other = {"step_time_s": 0.1, "forward_us": forward_us, "backward_us": 2 * backward_us}
    ranks = [{"forward_us": 1.0, "steps": [one]} for one in (step, other)]
    [found] = compare_paced(plan, {"host_pace": ranks}, alone=True)
    assert isinstance(plan.workload, TrainingWorkload)
    usual = training_step(plan.model, plan.workload, plan.parallelism, rates, alone=True)
    host_s, paces = usual.host_s, rates.host.paces
    ahead_s = 3 / paces[0] * (float(host_s["forward"]) + float(host_s["optimizer"]))
    assert found.predicted == pytest.approx(ahead_s + 2 / paces[1] * float(host_s["backward"]))
    assert (found.quantity, found.measured) == ("paced_step", 0.2)
    for without in ({}, {"host_pace": [{"forward_us": 1.0}]}):
        assert compare_paced(plan, without, alone=True) == []
