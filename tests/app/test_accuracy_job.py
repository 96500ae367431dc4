"""Accuracy in the background: the same report, progress meanwhile, faults told once."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from app import accuracy_job
from app.accuracy_job import AccuracyJob
from app.components.accuracy_view import _statistics
from planner.accuracy import AccuracyReport, accuracy_report
from planner.records import parse_row

RECORDED = Path(__file__).resolve().parents[2] / "recorded" / "h200-main-job.jsonl"


def stored(count: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDED.read_text().splitlines()[:count]]


def test_rows_one_by_one_give_the_report_over_all() -> None:
    rows = stored(3)
    report = AccuracyJob().report(rows, None)
    assert report is not None
    assert report.to_dict() == accuracy_report([parse_row(row) for row in rows]).to_dict()


def test_a_row_that_cannot_be_read_is_left_out() -> None:
    rows = stored(1)
    report = AccuracyJob().report([*rows, {**rows[0], "id": "0" * 16, "kind": "dream"}], None)
    assert report is not None
    assert report.to_dict() == accuracy_report([parse_row(rows[0])]).to_dict()


def test_meanwhile_it_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, released, asked = stored(2), Event(), []

    def slow(row: dict[str, Any]) -> AccuracyReport:
        asked.append(row["id"])
        if len(asked) == 2:
            released.wait()
        return accuracy_report([])

    monkeypatch.setattr(accuracy_job, "_report_of", slow)
    job = AccuracyJob()
    while job.done(rows) == 0:
        assert job.report(rows, 0.01) is None
    assert job.done(rows) == 1
    released.set()
    assert job.report(rows, None) is not None
    assert asked == [row["id"] for row in rows]


def test_a_fault_is_raised_where_it_is_seen_and_then_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(row: dict[str, Any]) -> AccuracyReport:
        raise ZeroDivisionError

    job = AccuracyJob()
    with monkeypatch.context() as patch:
        patch.setattr(accuracy_job, "_report_of", broken)
        with pytest.raises(ZeroDivisionError):
            job.report(stored(1), None)
    assert job.report(stored(1), None) is not None


def test_a_mean_that_rounds_to_zero_has_no_sign() -> None:
    found = {"n": 3, "mean_percent": -0.004, "mean_absolute_percent": 0.01}
    shown = _statistics({**found, "p90_percent": 0.02, "worst_percent": -0.163})
    assert str(shown["signed mean %"]) == "0.0"
    assert shown["worst %"] == -0.16
