"""A limit looked for by runs is the limit, wherever the prediction was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.limit_run import (
    FITS,
    NOT_PLANNED,
    OUT_OF_MEMORY,
    LimitRun,
    Trial,
    limit_of,
    limit_sentence,
    next_value,
    parse_limit,
)
from planner.plan import default_plan


def trial(value: int, outcome: str) -> Trial:
    return Trial(value=value, outcome=outcome, predicted_bytes=None, device_bytes=None, seconds=1.0)


def searched(run: LimitRun, limit: int) -> list[Trial]:
    """Run a search on a machine that takes values up to `limit`."""
    trials: list[Trial] = []
    while (value := next_value(run, trials)) is not None:
        trials.append(trial(value, FITS if value <= limit else OUT_OF_MEMORY))
    return trials


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_proven_limit_is_the_machines(limit: int, predicted: int) -> None:
    run = LimitRun(name="micro_batch", predicted=predicted or None, max_runs=64)
    trials = searched(run, limit)
    assert limit_of(run, trials)["proven"] == limit
    assert len({one.value for one in trials}) == len(trials)


def test_a_prediction_that_is_right_takes_two_runs() -> None:
    run = LimitRun(name="micro_batch", predicted=11)
    assert [one.value for one in searched(run, 11)] == [11, 12]


def test_the_search_begins_at_the_predicted_edge() -> None:
    """40,448 tokens have the verdict "fits", 41,344 are predicted to run with no room to spare."""
    run = LimitRun(name="sequence_length", predicted=40_448, edge=41_344)
    trials = searched(run, 41_344)
    assert [one.value for one in trials] == [41_344, 41_472]
    assert limit_sentence(limit_of(run, trials)) == (
        "The largest sequence that fits is 41,344 tokens, 41,472 ran out of memory (proven by 2 short "
        "runs). Predicted with the verdict 'fits': 40,448 tokens, 2.2 % below it; to run with no room "
        "to spare: 41,344 tokens, as proven."
    )


def test_a_limit_recorded_before_there_was_an_edge_is_still_said() -> None:
    run = LimitRun(name="micro_batch", predicted=9)
    found = limit_of(run, searched(run, 9))
    del found["edge"]
    assert limit_sentence(found).endswith("Predicted with the verdict 'fits': 9, as proven.")


def test_the_way_doubles_from_the_prediction_and_is_halved_back() -> None:
    """128 tokens are the step: 40,960 + 1, 3 and 7 steps ran, + 15 did not; then 11, 9 and 10."""
    run = LimitRun(name="sequence_length", predicted=40_960)
    steps = [(one.value - 40_960) / 128 for one in searched(run, 40_960 + 9 * 128)]
    assert steps == [0, 1, 3, 7, 15, 11, 9, 10]


def test_what_is_not_told_after_all_runs_is_a_bracket() -> None:
    run = LimitRun(name="micro_batch", predicted=8, max_runs=3)
    found = limit_of(run, searched(run, 100))
    assert found["proven"] is None
    assert limit_sentence(found) == (
        "The largest micro-batch that fits is at least 11: none ran out of memory (proven by 3 short "
        "runs). Predicted with the verdict 'fits': 8."
    )
    found = limit_of(run, [trial(8, FITS), trial(64, OUT_OF_MEMORY)])
    assert "is between 8 and 64: not told nearer" in limit_sentence(found)


def test_a_proven_limit_is_said_beside_the_predicted_one() -> None:
    run = LimitRun(name="sequence_length", predicted=24_000)
    found = limit_of(run, searched(run, 25_100))
    # In steps of 128: 187, 188, 190 and 194 ran, 202 and 198 did not, 196 ran, 197 did not.
    assert found["proven"] == 25_088
    assert limit_sentence(found) == (
        "The largest sequence that fits is 25,088 tokens, 25,216 ran out of memory (proven by 8 short "
        "runs). Predicted with the verdict 'fits': 24,000 tokens, 4.3 % below it."
    )


def test_nothing_fits_is_an_answer_too() -> None:
    run = LimitRun(name="micro_batch", predicted=None)
    found = limit_of(run, searched(run, 0))
    assert found["proven"] == 0
    assert limit_sentence(found).startswith("No micro-batch fits: the smallest ran out of memory")


def test_a_value_that_cannot_be_planned_ends_the_way_up() -> None:
    run = LimitRun(name="num_layers", predicted=40)
    found = limit_of(run, [trial(40, FITS), trial(41, NOT_PLANNED)])
    assert found["proven"] == 40
    assert "40 layers, the largest that can be planned" in limit_sentence(found)


@pytest.mark.parametrize(
    ("given_", "world", "sentence"),
    [
        ({"name": "heads"}, "solo", "limit.name is 'heads': it must be one of micro_batch"),
        ({"name": "micro_batch"}, "cpu", "world is 'cpu': what fits a GPU is proven on one"),
        ({"name": "micro_batch", "predicted": -1}, "solo", "limit.predicted is -1"),
        ({"name": "micro_batch", "edge": 0}, "solo", "limit.edge is 0"),
        ({"name": "micro_batch", "max_runs": 0}, "nccl", "limit.max_runs is 0"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    given_: dict[str, object], world: str, sentence: str
) -> None:
    with pytest.raises(PlanError) as problem:
        parse_limit({"predicted": 1, **given_}, default_plan(), world)
    assert str(problem.value).startswith(sentence)
