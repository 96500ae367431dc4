"""Public reports as plans: what is read, what is predicted, how an error is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.plan import parse_plan
from planner.predict import predict
from planner.public_cases import Answer, PublicCase, answer, read_cases

TRAINING = Path(__file__).resolve().parents[2] / "recorded" / "public" / "training.json"
PLAN = {
    "schema": 1,
    "job": "train",
    "model": {"preset": "openai-community/gpt2"},
    "workload": {"sequence_length": 512},
    "parallelism": {"engine": "peakmark", "zero_stage": 0, "world_size": 1},
    "hardware": {"preset": "h200-sxm5-141gb"},
}
ROW = {
    "id": "a-case",
    "report": "GT-1",
    "source": "somewhere",
    "label": "gpt2",
    "plan": PLAN,
    "counter": "reserved",
    "bytes": [100, 200],
    "note": "Nothing is open.",
}


def _case(tmp_path: Path, **changes: Any) -> PublicCase:
    file = tmp_path / "cases.json"
    row = {name: value for name, value in {**ROW, **changes}.items() if value is not None}
    file.write_text(json.dumps({"schema": 1, "cases": [row], "left_out": {"no": ["GT-2"]}}))
    return read_cases(file).cases[0]


def _answer(case: PublicCase, predicted: int | None, state: str | None = "fits") -> Answer:
    return Answer(case=case, predicted_bytes=predicted, state=state, refusal=None)


@pytest.mark.parametrize(("predicted", "error"), [(90, -10), (100, 0), (170, 0), (300, 50)])
def test_the_error_is_to_the_nearest_published_value(
    tmp_path: Path, predicted: int, error: float
) -> None:
    assert _answer(_case(tmp_path), predicted).error_percent == pytest.approx(error)


@pytest.mark.parametrize(
    ("state", "outcome", "text"),
    [
        ("fits", "ran", "right"),
        ("fits", "out of memory", "wrong"),
        ("does_not_fit", "out of memory", "right"),
        ("does_not_fit", "ran", "wrong"),
        ("tight", "ran", "open"),
    ],
)
def test_an_outcome_is_held_against_the_verdict(
    tmp_path: Path, state: str, outcome: str, text: str
) -> None:
    case = _case(tmp_path, counter="outcome", bytes=None, outcome=outcome)
    assert _answer(case, 5, state).error_text == text
    assert case.measured_text == outcome


def test_the_counter_s_bytes_are_predicted(tmp_path: Path) -> None:
    memory = predict(parse_plan(PLAN)).to_dict()["memory"]
    for counter in ("allocated", "reserved", "device"):
        found = answer(_case(tmp_path, counter=counter))
        assert found.predicted_bytes == memory[f"{counter}_bytes"]


def test_a_refused_plan_says_why(tmp_path: Path) -> None:
    plan = {**PLAN, "workload": {"attention": "ring"}}
    found = answer(_case(tmp_path, plan=plan))
    assert found.refusal is not None and "workload.attention" in found.refusal
    assert (found.predicted_text, found.error_text) == ("-", "-")


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": None},
        {"bytes": [200, 100]},
        {"counter": "guessed"},
        {"counter": "outcome"},
        {"outcome": "ran"},
    ],
)
def test_a_case_needs_one_measurement(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a-case"):
        _case(tmp_path, **changes)


def test_every_report_is_in_or_left_out_once() -> None:
    cases = read_cases(TRAINING)
    left_out = [report for ids in cases.left_out.values() for report in ids]
    assert len(left_out) == len(set(left_out))
    assert not {case.report for case in cases.cases} & set(left_out)
    assert len(left_out) + cases.num_reports == 143
    assert len({case.id for case in cases.cases}) == len(cases.cases)
