"""What a person reads when an input is wrong."""

from __future__ import annotations

from planner.errors import PlanError, describe_value


def test_the_sentence_names_field_value_and_what_is_allowed() -> None:
    error = PlanError("workload.micro_batch", 0, "an integer from 1 to 65536")
    assert str(error) == "workload.micro_batch is 0: it must be an integer from 1 to 65536."
    assert (error.field, error.value, error.allowed) == (
        "workload.micro_batch",
        0,
        "an integer from 1 to 65536",
    )


def test_a_value_is_described_in_few_characters_whatever_it_is() -> None:
    assert describe_value({"a": 1, "b": 2}) == "an object with 2 keys"
    assert describe_value([1, 2, 3]) == "a list of 3 values"
    assert describe_value(10**5000) == "an integer of 16610 bits"
    assert len(describe_value("x" * 1000)) == 60
    assert describe_value("\ud800é") == "'\\ud800\\xe9'"
