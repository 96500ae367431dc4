"""The front is what a brute-force loop finds, and the best is replayed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.choice import (
    Aim,
    best_of,
    cost_per_million_tokens,
    differences,
    front_rows,
    pareto_front,
)
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.sweep import plan_with, sweep
from planner.sweep_axes import Limits, axes_of
from planner.verdict import State

FULL = {
    "zero_stage": (1, 2, 3),
    "gpus": (1, 2, 8),
    "micro_batch": (1, 2, 4, 8, 16),
    "checkpointing": ("none", "full"),
}


def plan_of() -> Plan:
    return parse_plan({"model": {"preset": "llama-3.2-1b"}, "hardware": {"preset": "h200"}})


def swept(limits: Limits | None = None, **given: Any) -> Any:
    plan, limits = plan_of(), limits or Limits()
    return sweep(plan, axes_of(plan, {**FULL, **given}, limits), limits)


def brute_force(speed: Any, size: Any, gpus: Any) -> list[int]:
    """Rows that none equals or beats in speed, memory, GPUs and cost per token and beats in one."""
    points = [
        (-float(t), float(m), float(n), float(n) / float(t))
        for t, m, n in zip(speed, size, gpus, strict=True)
    ]

    def beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return all(a <= b for a, b in zip(one, other, strict=True)) and one != other

    return [i for i, own in enumerate(points) if not any(beats(other, own) for other in points)]


@pytest.mark.parametrize("seed", range(6))
def test_the_front_is_what_a_loop_over_all_pairs_finds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    # Few values, so that many are equal.
    speed = draw.integers(1, 12, 150).astype(float)
    size, gpus = draw.integers(1, 12, 150), 2 ** draw.integers(0, 4, 150)
    assert pareto_front(speed, size, gpus).tolist() == brute_force(speed, size, gpus)


def test_the_front_of_a_sweep_holds_only_what_fits() -> None:
    found = swept(Limits(margin=0.3))
    rows = np.flatnonzero(found.is_admissible)
    columns = [found.columns[n][rows] for n in ("tokens_per_s", "device_bytes", "gpus")]
    expected = rows[brute_force(*columns)]
    front = front_rows(found)
    assert sorted(front.tolist()) == expected.tolist()
    speed = found.columns["tokens_per_s"][front]
    assert (np.diff(speed) <= 0).all()
    assert found.columns["device_bytes"][front].max() <= 0.7 * plan_of().hardware.visible_bytes


def test_nothing_has_no_front() -> None:
    empty = np.array([])
    assert pareto_front(empty, empty, empty).tolist() == []
    found = swept(Limits(max_gpus=1), gpus=(2,))
    assert front_rows(found).tolist() == []
    assert best_of(found) is None


@pytest.mark.parametrize("aim", Aim)
def test_the_best_is_the_best_of_all_that_fit_when_replayed(aim: Aim) -> None:
    limits = Limits(margin=0.1)
    found = swept(limits, gpus=(1, 8), micro_batch=(1, 4, 16))
    column = {"fastest": "tokens_per_s", "cheapest": "tokens_per_s_per_gpu"}[aim]
    most_bytes = 0.9 * plan_of().hardware.visible_bytes
    reached = {}
    for row in found.records():
        single = predict(plan_with(plan_of(), row))
        verdict = single.verdict
        if verdict.state is State.FITS and verdict.needed_bytes <= most_bytes:
            value = getattr(single.throughput, column)
            reached[value] = single.plan
    best = best_of(found, aim)
    assert best is not None
    assert best.row[column] == pytest.approx(max(reached), rel=1e-9)
    single = predict(best.plan)
    assert best.row["device_bytes"] == single.memory["device_bytes"]


def test_the_sentence_says_what_and_why() -> None:
    found = swept(gpus=(8,), micro_batch=(1, 2, 4, 8, 16, 32, 64), checkpointing=("none",))
    best = best_of(found)
    assert best is not None and best.better is not None
    sentence = best.sentence()
    assert sentence.startswith("Run peakmark ZeRO-")
    assert f"micro-batch {best.row['micro_batch']} of 4,096 tokens" in sentence
    assert f"{best.row['tokens_per_s'] / 1000:.4g} k tokens/s" in sentence
    gain = best.better["tokens_per_s"] / best.row["tokens_per_s"] - 1
    assert (
        f"micro-batch {best.better['micro_batch']} would be {100 * gain:.1f} % better" in sentence
    )
    assert sentence.count(".  ") == 0 and sentence.endswith(".")
    alone = best_of(swept(gpus=(8,), micro_batch=(1,), zero_stage=(3,), checkpointing=("none",)))
    assert alone is not None
    assert "nothing that was left open is better" in alone.sentence()
    assert alone.to_dict()["better"] is None


def test_a_better_plan_that_the_replay_refutes_is_passed_over() -> None:
    found = swept(gpus=(8,), zero_stage=(3,), checkpointing=("none",))
    columns = dict(found.columns)
    # As if the formulas let the largest fit easily.
    columns["device_bytes"] = np.where(columns["micro_batch"] == 16, 1, columns["device_bytes"])
    columns["verdict"] = np.where(columns["micro_batch"] == 16, "fits", columns["verdict"])
    wrong = type(found)(
        plan=found.plan, limits=found.limits, columns=columns, not_planned=found.not_planned
    )
    honest, best = best_of(found), best_of(wrong)
    assert best is not None and honest is not None
    assert best.refuted == 1
    assert best.row == honest.row
    assert 16 not in (best.row["micro_batch"], (best.leanest or {}).get("micro_batch"))


def test_cost_is_price_over_tokens_of_an_hour() -> None:
    # 2,000 tokens/s are 7.2 million an hour.
    assert cost_per_million_tokens(2000.0, 3.6) == pytest.approx(0.5)


def test_differences_name_the_choices_alone() -> None:
    found = swept(gpus=(8,))
    one, other = found.record(0), found.record(1)
    assert differences(other, one) == "micro-batch 2"
    assert differences(one, one) == "the same"
