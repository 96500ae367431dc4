"""Which alternative is chosen, what that costs, and how a blind choice would fare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from planner import accuracy
from planner.plan import parse_plan
from planner.ranking import RankedGroup, RankingReport, Timed, ranking_report
from planner.records import Kind, RecordedRow, Role
from planner.throughput import training_throughput


def group(*times: tuple[float, float]) -> RankedGroup:
    """A group of (predicted, measured) seconds."""
    timed = tuple(
        Timed(words=f"choice {i}", predicted_s=p, measured_s=m) for i, (p, m) in enumerate(times)
    )
    return RankedGroup(title="x", quantity="step_time", alternatives=timed)


def test_regret_is_what_the_chosen_one_takes_longer() -> None:
    # The second is predicted fastest and takes 1.1 s, where the first takes 1.0 s.
    found = group((2.0, 1.0), (1.5, 1.1), (3.0, 1.02))
    assert (found.chosen.words, found.fastest.words) == ("choice 1", "choice 0")
    assert found.regret_percent == pytest.approx(10)
    # 1.0 and 1.02 are within 3 %.
    assert found.good_share == pytest.approx(2 / 3)
    # 1.0 and 1.02 are alike; 1.1 is predicted faster than both and is slower.
    assert found.pairs() == (2, 0)


def test_the_report_counts_groups_and_pairs() -> None:
    report = RankingReport(groups=(group((2.0, 1.0), (1.0, 1.5)), group((1.0, 1.0), (2.0, 2.0))))
    assert (report.good, report.pairs) == (1, (2, 1))
    assert report.blind == pytest.approx(1.0)
    assert report.sentence() == (
        "In 1 of 2 groups (50 %) the alternative predicted to be fastest is within 3 % of the fastest "
        "measured (a blind choice: 50 %); at worst it is 50.0 % slower. Of 2 pairs that differ by "
        "more, 1 (50 %) are ordered right."
    )
    assert RankingReport(groups=()).sentence() == "No recorded step has an alternative."


def test_what_repeats_cannot_tell_apart_is_not_lost() -> None:
    """Runs of one plan spread by 10 %: two single runs are told apart from 1.96 x 0.1 x 2^0.5 on."""
    once = (
        Timed(words="a", predicted_s=1.0, measured_s=1.2),
        Timed(words="b", predicted_s=2.0, measured_s=1.0),
    )
    found = RankedGroup(title="x", quantity="step_time", alternatives=once, spread=(0.1, 5))
    assert found.told_apart_percent == pytest.approx(100 * (math.exp(0.27719) - 1), rel=1e-4)
    assert (found.is_good, found.is_lost) == (False, False)
    # Nine runs of each: 1.96 x 0.1 x (2 / 9)^0.5 is 9.7 %, and 20 % is beyond it.
    often = tuple(replace(one, runs=9) for one in once)
    assert replace(found, alternatives=often).is_lost
    # What was never run twice says nothing in favour of a choice.
    assert replace(found, spread=None).is_lost
    report = RankingReport(groups=(found, replace(found, spread=None)))
    assert (report.good, report.not_lost) == (0, 1)
    assert "counted as no loss, it is 1 of 2 groups (50 %)." in report.repeats_sentence()


def test_an_exact_prediction_is_called_good_as_often_as_luck_allows() -> None:
    """Two alike alternatives, single runs spread by 10 %: good where ln of their ratio is at most ln 1.03.

    It is normal with standard deviation 0.1 x 2^0.5, so P(Z <= 0.02956 / 0.14142) = 0.5828.
    """
    alike = (
        Timed(words="a", predicted_s=1.0, measured_s=1.2),
        Timed(words="b", predicted_s=1.0, measured_s=1.0),
    )
    found = RankedGroup(title="x", quantity="step_time", alternatives=alike, spread=(0.1, 5))
    assert found.exact_share == pytest.approx(0.5828, abs=0.02)
    # A hundred runs of each: P(Z <= 2.09) = 0.9817. Without repeats nothing is known of luck.
    often = tuple(replace(one, runs=100) for one in alike)
    assert replace(found, alternatives=often).exact_share == pytest.approx(0.9817, abs=0.01)
    assert replace(found, spread=None).exact_share == 1.0
    report = RankingReport(groups=(found, replace(found, spread=None)))
    assert report.exact == pytest.approx(1.5828, abs=0.02)
    assert report.repeats_sentence().endswith("would call 1.6 groups (79 %) good.")


def test_the_spread_is_that_of_runs_of_one_plan() -> None:
    """0.10, 0.11 and 0.12 s of one plan, 0.2 and 0.3 s of another: squares about their own means."""
    full = {"checkpointing": "full"}
    report = report_of(
        [
            row(1, 0.10), row(2, 0.11), row(3, 0.12),
            row(4, 0.20, workload=full), row(5, 0.30, workload=full),
        ]
    )  # fmt: skip
    (found,) = report.groups
    logs = [[math.log(x) for x in runs] for runs in ((0.10, 0.11, 0.12), (0.2, 0.3))]
    squares = sum((x - sum(runs) / len(runs)) ** 2 for runs in logs for x in runs)
    assert found.spread == (pytest.approx(math.sqrt(squares / 3)), 3)
    assert sorted(one.runs for one in found.alternatives) == [2, 3]


def row(number: int, measured_s: float | None, role: Role = Role.EVIDENCE, **parts: Any) -> Any:
    spread = {"world_size": 1, "zero_stage": 0, **parts.pop("parallelism", {})}
    plan = {
        "model": {"preset": "gpt2"},
        "hardware": {"preset": "h200"},
        "workload": {"sequence_length": 256, **parts.pop("workload", {})},
        "parallelism": spread,
    }
    versions = {"torch": parts.pop("torch", "2.11"), "transformers": "5.24.0"}
    return RecordedRow(
        id=f"{number:016x}",
        kind=Kind.TRAIN_STEP,
        recorded_at=datetime(2026, 1, 1, tzinfo=UTC),
        role=role,
        spec={"kind": "train_step", "plan": plan, "world": parts.pop("world", "nccl")},
        outcome=parts.pop("outcome", "done"),
        measured={} if measured_s is None else {"step_time_s": measured_s},
        environment={"gpu": {"name": "NVIDIA H200"}, "versions": versions},
    )


def report_of(rows: Sequence[Any]) -> RankingReport:
    return ranking_report(rows)


def test_rows_are_grouped_by_what_they_compute() -> None:
    full, longer = {"checkpointing": "full"}, {"sequence_length": 512}
    report = report_of(
        [
            row(1, 0.10),
            row(2, 0.12),
            row(3, 0.14),
            row(4, 0.11, workload=full),
            row(5, 0.30, workload=longer),
            row(6, 0.10, workload=full, torch="2.12"),
            row(7, 0.10, workload={"attention": "eager"}, role=Role.CALIBRATION),
            row(8, 0.10, workload={"attention": "eager"}, world="cpu"),
            row(9, 0.10, workload={"attention": "eager"}, outcome="oom_device"),
            row(10, None, workload={"attention": "eager"}),
        ]
    )
    (found,) = report.groups
    timed = {one.words: one for one in found.alternatives}
    assert set(timed) == {
        "engine peakmark, zero stage 0",
        "engine peakmark, zero stage 0, checkpointing full",
    }
    # The median of 0.10, 0.12 and 0.14.
    assert timed["engine peakmark, zero stage 0"].measured_s == pytest.approx(0.12)
    plan = parse_plan(row(1, 0.1).spec["plan"])
    speed = training_throughput(plan.model, plan.workload, plan.parallelism, plan.hardware)  # type: ignore[arg-type]
    predicted = timed["engine peakmark, zero stage 0"].predicted_s
    assert predicted == pytest.approx(speed.step_time_s)


def test_rows_that_set_a_constant_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(1, 0.10), row(2, 0.11, workload={"checkpointing": "full"})]
    assert len(report_of(rows).groups) == 1
    monkeypatch.setattr(accuracy, "rows_used", lambda: frozenset({f"{2:016x}"}))
    assert report_of(rows).groups == ()
