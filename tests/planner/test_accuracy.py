"""Accuracy: errors worked out by hand, roles kept apart, and the committed bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner import accuracy
from planner.accuracy import (
    AccuracyReport,
    accuracy_report,
    breaches,
    device_ratios,
    merged_reports,
    summarize,
    unexplained,
)
from planner.comparison import TIME_QUANTITIES, compare
from planner.hardware import resolve_gpu
from planner.plan import Plan
from planner.records import RecordedRow, parse_row, row_id
from planner.speed.calibrated import rows_used

RECORDED = Path(__file__).resolve().parents[2] / "recorded"
PLAN = {
    "schema": 1,
    "job": "train",
    "model": {"preset": "openai-community/gpt2"},
    "workload": {"sequence_length": 512},
    "parallelism": {"engine": "peakmark", "zero_stage": 2, "world_size": 4},
    "hardware": {"preset": "h200-sxm5-141gb"},
}


class FixedPrediction:
    """Predicts 110 allocated, 120 reserved and 150 device bytes, and 0.2 s, for every plan."""

    def __init__(self, state: str = "fits", world_size: int = 4) -> None:
        self.state = state
        self.world_size = world_size

    def to_dict(self) -> dict[str, Any]:
        parts = {"parameters": 10, "gradients": 20, "optimizer": 30, "activations": 50}
        return {
            "plan": {"parallelism": {"world_size": self.world_size, "engine": "peakmark"}},
            "memory": {
                "allocated_bytes": 110,
                "reserved_bytes": 120,
                "device_bytes": 150,
                "phases": [{"name": "optimizer", "parts": parts}],
            },
            "verdict": {"state": self.state},
            "throughput": {"step_time_s": 0.2},
        }


def recorded(
    measured: dict[str, Any],
    *,
    role: str = "evidence",
    outcome: str = "done",
    world: str = "solo",
    kind: str = "train_step",
    plan: dict[str, Any] | None = None,
) -> RecordedRow:
    spec = {"kind": kind, "world": world, "plan": plan or PLAN, "attention": {}}
    environment = {"gpu": {"name": "NVIDIA H200"}}
    row = {
        "schema": 1,
        "id": row_id(spec, measured, environment),
        "kind": kind,
        "recorded_at": "2026-11-29T12:00:00Z",
        "role": role,
        "spec": spec,
        "outcome": outcome,
        "measured": measured,
        "environment": environment,
    }
    return parse_row(row)


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a test choose the verdict that the fixed prediction gives."""
    fixed = FixedPrediction()

    def predict(plan: Plan) -> FixedPrediction:
        return fixed

    monkeypatch.setattr(accuracy, "predict", predict)
    return fixed


def test_statistics_of_four_errors_by_hand() -> None:
    found = summarize([10.0, -20.0, 0.0, 2.0])
    assert found.n == 4
    assert found.mean_percent == pytest.approx(-2.0)
    assert found.mean_absolute_percent == pytest.approx(8.0)
    # Absolute errors 0, 2, 10, 20: rank 0.9 x 3 = 2.7 lies 0.7 of the way from 10 to 20.
    assert found.p90_percent == pytest.approx(17.0)
    assert found.worst_percent == -20.0


def test_errors_are_relative_to_the_measurement(verdict: FixedPrediction) -> None:
    measured = {"allocated_bytes": 100, "reserved_bytes": 160, "device_bytes": 200}
    report = accuracy_report([recorded(measured)])
    overall = report.overall()
    assert overall["allocated"].mean_percent == pytest.approx(10.0)
    assert overall["reserved"].mean_percent == pytest.approx(-25.0)
    assert overall["device"].mean_percent == pytest.approx(-25.0)
    assert report.evidence_rows == 1


def test_calibration_rows_are_listed_and_never_counted(verdict: FixedPrediction) -> None:
    rows = [
        recorded({"allocated_bytes": 100}),
        recorded({"allocated_bytes": 55}, role="calibration"),
    ]
    report = accuracy_report(rows)
    assert report.overall()["allocated"].n == 1
    assert report.overall()["allocated"].worst_percent == pytest.approx(10.0)
    assert (report.evidence_rows, report.calibration_rows) == (1, 1)
    assert [residual.role.value for residual in report.residuals] == ["evidence", "calibration"]


def test_held_out_rows_count_with_the_rest_and_apart(verdict: FixedPrediction) -> None:
    rows = [
        recorded({"allocated_bytes": 100}),
        recorded({"allocated_bytes": 88}, role="holdout"),
        recorded({"allocated_bytes": 55}, role="calibration"),
    ]
    report = accuracy_report(rows)
    assert (report.evidence_rows, report.holdout_rows, report.calibration_rows) == (2, 1, 1)
    assert report.overall()["allocated"].mean_percent == pytest.approx((10 + 25) / 2)
    assert report.holdout()["allocated"].mean_percent == pytest.approx(25.0)
    document = report.to_dict()
    assert document["rows"]["holdout"] == 1
    assert document["holdout_quantities"]["allocated"]["n"] == 1


def test_the_bounds_of_held_out_rows_are_their_own(verdict: FixedPrediction) -> None:
    bounds = {
        "quantities": {"allocated": {"worst_percent": 30.0}},
        "holdout": {"quantities": {"allocated": {"worst_percent": 20.0}}},
        "false_fits": 0,
        "false_does_not_fit": 0,
    }
    held = recorded({"allocated_bytes": 88}, role="holdout")
    assert breaches(accuracy_report([recorded({"allocated_bytes": 88})]), bounds) == []
    assert breaches(accuracy_report([held]), bounds) == [
        "holdout allocated worst_percent is 25.00: the bound is 20.0"
    ]


def test_a_row_far_off_needs_an_explanation(verdict: FixedPrediction) -> None:
    near, far = recorded({"reserved_bytes": 110}), recorded({"reserved_bytes": 100})
    report = accuracy_report([near, far])
    sentence = f"{far.id}: reserved is off by +20.0 % and not explained"
    assert unexplained(report, {near.id: "does not matter"}) == [sentence]
    assert unexplained(report, {far.id: " "}) == [sentence]
    assert unexplained(report, {far.id: "the allocator was not replayed"}) == []


def test_history_is_of_device_bytes_else_of_reserved_bytes(verdict: FixedPrediction) -> None:
    rows = [
        recorded({"reserved_bytes": 100, "device_bytes": 180}),
        recorded({"reserved_bytes": 96}),
        recorded({"reserved_bytes": 1, "device_bytes": 1}, role="calibration"),
    ]
    found = device_ratios(accuracy_report(rows))
    # 180 / 150 and 96 / 120.
    assert [ratio for _, ratio in found] == pytest.approx([1.2, 0.8])
    assert found[0][0]["engine"] == "peakmark"


@pytest.mark.parametrize(("world", "more_mib"), [("nccl", 0), ("solo", 842 - 70)])
def test_a_rank_alone_has_the_memory_that_a_communicator_would_hold(
    verdict: FixedPrediction, monkeypatch: pytest.MonkeyPatch, world: str, more_mib: int
) -> None:
    """Of two ranks: what NCCL takes, less what work on streams of its own takes anyway."""
    plan = {
        **PLAN,
        "parallelism": {"zero_stage": 2, "world_size": 2},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    seen: list[Plan] = []
    monkeypatch.setattr(accuracy, "predict", lambda plan: seen.append(plan) or verdict)
    accuracy_report([recorded({"allocated_bytes": 1}, world=world, plan=plan)])
    whole = resolve_gpu("h200-sxm5-141gb").visible_bytes
    assert seen[0].hardware.visible_bytes - whole == more_mib * 2**20


def test_rows_of_other_kinds_and_outcomes_are_not_counted(verdict: FixedPrediction) -> None:
    rows = [recorded({}, kind="attention"), recorded({"allocated_bytes": 1}, outcome="failed")]
    report = accuracy_report(rows)
    assert report.other_rows == 2
    assert report.overall() == {}


def test_groups_part_the_errors(verdict: FixedPrediction) -> None:
    eager = {**PLAN, "workload": {"sequence_length": 512, "attention": "eager"}}
    rows = [recorded({"allocated_bytes": 100}), recorded({"allocated_bytes": 220}, plan=eager)]
    groups = accuracy_report(rows).by_group()
    assert groups["attention"]["sdpa"]["allocated"].mean_percent == pytest.approx(10.0)
    assert groups["attention"]["eager"]["allocated"].mean_percent == pytest.approx(-50.0)
    assert groups["architecture"]["gpt2"]["allocated"].n == 2
    assert groups["gpu"]["NVIDIA H200"]["allocated"].n == 2
    assert set(groups["stage"]) == {"2"}


@pytest.mark.parametrize(
    ("state", "outcome", "false_fits", "false_does_not_fit"),
    [
        ("fits", "done", 0, 0),
        ("tight", "done", 0, 0),
        ("does_not_fit", "done", 0, 1),
        ("does_not_fit", "oom_device", 0, 0),
        ("fits", "oom_device", 1, 0),
        ("tight", "oom_device", 0, 0),
    ],
)
def test_wrong_verdicts_are_counted(
    verdict: FixedPrediction, state: str, outcome: str, false_fits: int, false_does_not_fit: int
) -> None:
    verdict.state = state
    report = accuracy_report([recorded({"allocated_bytes": 110}, outcome=outcome)])
    assert len(report.false_fits) == false_fits
    assert len(report.false_does_not_fit) == false_does_not_fit
    assert report.confusion()[state][outcome] == 1


def test_an_out_of_memory_row_counts_for_the_verdict_only(verdict: FixedPrediction) -> None:
    verdict.state = "does_not_fit"
    report = accuracy_report([recorded({"allocated_bytes": 90}, outcome="oom_device")])
    assert report.residuals == ()


def test_a_verdict_on_a_calibration_row_is_not_counted(verdict: FixedPrediction) -> None:
    row = recorded({}, outcome="oom_device", role="calibration")
    assert accuracy_report([row]).false_fits == ()


def test_the_cpu_compares_the_training_state_only() -> None:
    measured = {
        "allocated_bytes": None,
        "step_time_s": 9.0,
        "state": {"parameter_bytes": 10, "gradient_bytes": 25, "optimizer_bytes": 24},
    }
    found = {c.quantity: c for c in compare(FixedPrediction().to_dict(), measured, "cpu")}
    assert set(found) == {"parameters state", "gradients state", "optimizer state"}
    assert found["parameters state"].error_percent == 0.0
    assert found["gradients state"].error_percent == pytest.approx(-20.0)
    assert found["optimizer state"].error_percent == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("world", "world_size", "timed"),
    [("nccl", 4, True), ("solo", 1, True), ("solo", 4, False), ("shared", 4, False)],
)
def test_time_is_compared_only_in_a_world_that_keeps_it(
    world: str, world_size: int, timed: bool
) -> None:
    prediction = FixedPrediction(world_size=world_size).to_dict()
    found = compare(prediction, {"step_time_s": 0.25, "allocated_bytes": 110}, world)
    assert ("step_time" in {c.quantity for c in found}) is timed


def test_collectives_take_the_time_of_the_rank_that_came_last_to_each() -> None:
    prediction = FixedPrediction().to_dict()
    sent = [{"time_s": 0.25}, {"time_s": 0.5}]
    prediction["throughput"] = {**prediction["throughput"], "communication": sent}
    ranks: list[dict[str, Any]] = [
        {"collectives": {"all_gather": {"time_s": 2.0, "times_s": [0.2, 1.8]}}},
        {"collectives": {"all_gather": {"time_s": 1.5, "times_s": [1.1, 0.4]}}},
    ]
    found = {c.quantity: c for c in compare(prediction, {"kernel_times": ranks}, "nccl")}
    assert found["communication_time"].predicted == 0.75
    assert found["communication_time"].measured == pytest.approx(0.2 + 0.4)
    assert compare(prediction, {"kernel_times": ranks}, "solo") == []
    # Sums of a rank's calls hold its waits for the other: nothing to compare with.
    for rank in ranks:
        del rank["collectives"]["all_gather"]["times_s"]
    assert compare(prediction, {"kernel_times": ranks}, "nccl") == []


def test_a_row_that_todays_planner_refuses_is_named() -> None:
    plan = {**PLAN, "workload": {"sequence_length": 512, "attention": "ring"}}
    row = recorded({"allocated_bytes": 1}, plan=plan)
    report = accuracy_report([row])
    assert "workload.attention" in report.not_predicted[row.id]
    assert report.evidence_rows == 0


def test_breaches_name_what_is_out_of_bounds(verdict: FixedPrediction) -> None:
    report = accuracy_report([recorded({"allocated_bytes": 100})])
    bounds = {
        "quantities": {
            "allocated": {"mean_absolute_percent": 10.1, "worst_percent": 9.0},
            "step_time": {"worst_percent": 50.0},
        },
        "false_fits": 0,
        "false_does_not_fit": 0,
    }
    assert breaches(report, bounds) == [
        "allocated worst_percent is 10.00: the bound is 9.0",
        "there is no evidence for step_time",
    ]


def test_the_report_is_json(verdict: FixedPrediction) -> None:
    document = accuracy_report([recorded({"allocated_bytes": 100})]).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["quantities"]["allocated"]["n"] == 1
    assert document["rows"]["evidence"] == 1


@pytest.fixture(scope="module")
def recorded_report(
    recorded_rows: list[RecordedRow],
    recorded_reports: Callable[[], Mapping[str, AccuracyReport]],
) -> AccuracyReport:
    return merged_reports(recorded_reports()[row.id] for row in recorded_rows)


def test_recorded_rows_are_within_the_committed_bounds(recorded_report: AccuracyReport) -> None:
    bounds = json.loads((RECORDED / "bounds.json").read_text())
    assert breaches(recorded_report, bounds) == []


def test_every_recorded_row_far_off_is_explained(recorded_report: AccuracyReport) -> None:
    explanations = json.loads((RECORDED / "explanations.json").read_text())
    assert unexplained(recorded_report, explanations) == []


def _memory_quantities(world: str, engine: str = "peakmark") -> dict[str, float]:
    overheads = [{"name": "context", "bytes": 10}, {"name": "nccl", "bytes": 5}]
    memory = {
        "allocated_bytes": 100,
        "reserved_bytes": 110,
        "device_bytes": 125,
        "overheads": overheads,
    }
    prediction = {
        "memory": memory,
        "plan": {"parallelism": {"world_size": 2, "engine": engine}},
        "throughput": {"step_time_s": 1.0},
    }
    measured = {"allocated_bytes": 100, "reserved_bytes": 110, "device_bytes": 120}
    return {c.quantity: c.predicted for c in compare(prediction, measured, world)}


def test_ddp_alone_is_compared_by_its_tensors_only_and_real_ranks_by_all() -> None:
    assert set(_memory_quantities("solo", "ddp")) == {"allocated"}
    assert set(_memory_quantities("nccl", "ddp")) == {"allocated", "reserved", "device"}


def test_a_rank_alone_is_not_charged_for_a_communicator() -> None:
    assert _memory_quantities("nccl")["device"] == 125
    assert _memory_quantities("solo")["device"] == 120


def test_ranks_that_share_a_gpu_are_compared_by_allocated_bytes_alone() -> None:
    # gloo clones what it reduces: segments hold that too.
    assert set(_memory_quantities("shared")) == {"allocated"}


def test_device_bytes_read_after_segments_were_given_back_are_no_peak() -> None:
    prediction = FixedPrediction().to_dict()
    after = compare(prediction, {"reserved_bytes": 120, "device_bytes": 119}, "solo")
    assert [c.quantity for c in after] == ["reserved"]


def test_recorded_steps_take_about_what_is_predicted(recorded_report: AccuracyReport) -> None:
    found = recorded_report.overall()
    assert found["step_time"].mean_absolute_percent < 13
    assert found["step_time_alone"].mean_absolute_percent < 12
    used = {r.row_id for r in recorded_report.residuals if r.comparison.quantity in TIME_QUANTITIES}
    assert not used & rows_used()
