"""Checks of single values."""

from __future__ import annotations

import math
from enum import StrEnum

import pytest

from planner.checks import (
    canonical_json,
    check_boolean,
    check_choice,
    check_integer,
    check_mapping,
    check_number,
    check_text,
)
from planner.errors import PlanError


class Colour(StrEnum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [], math.nan, 0, 11, 10**400])
def test_only_integers_in_range_are_integers(value: object) -> None:
    with pytest.raises(PlanError, match="an integer from 1 to 10"):
        check_integer("n", value, 1, 10)
    assert check_integer("n", 10, 1, 10) == 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, "0.5", None, True, 10**400])
def test_only_finite_numbers_in_range_are_numbers(value: object) -> None:
    with pytest.raises(PlanError, match="a number from 0 to 1"):
        check_number("share", value, 0.0, 1.0)
    assert check_number("share", 1, 0.0, 1.0) == 1.0


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_only_booleans_are_booleans(value: object) -> None:
    with pytest.raises(PlanError, match="true or false"):
        check_boolean("flag", value)


@pytest.mark.parametrize("value", ["", "  ", "x" * 201, 3, None])
def test_a_name_has_characters_and_not_too_many(value: object) -> None:
    with pytest.raises(PlanError, match="a text of 1 to 200 characters"):
        check_text("name", value)


@pytest.mark.parametrize("value", ["green", 1, None, ["red"], "RED"])
def test_a_choice_lists_what_can_be_chosen(value: object) -> None:
    with pytest.raises(PlanError, match="one of red, blue"):
        check_choice("colour", value, Colour)
    assert check_choice("colour", "blue", Colour) is Colour.BLUE


def test_an_unknown_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(PlanError) as caught:
        check_mapping("workload", {"micro_bach": 1}, frozenset(("micro_batch",)))
    assert caught.value.field == "workload.micro_bach"
    assert str(caught.value) == "workload has no field 'micro_bach': its fields are micro_batch."


@pytest.mark.parametrize("value", [None, [], "text", 3, {1: 2}])
def test_an_object_has_text_keys(value: object) -> None:
    with pytest.raises(PlanError, match="an object with named fields"):
        check_mapping("model", value)


def test_nan_is_refused_by_the_path_to_it() -> None:
    with pytest.raises(PlanError) as caught:
        canonical_json("plan", {"a": [1, {"b": math.nan}]})
    assert caught.value.field == "plan.a[1].b"


def test_json_has_one_form() -> None:
    assert canonical_json("plan", {"b": 1, "a": "é"}) == '{"a":"\\u00e9","b":1}'


def test_what_json_cannot_hold_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {"a": {1, 2}}, {"n": 10**5000}):
        with pytest.raises(PlanError):
            canonical_json("plan", value)
