"""Links are read strictly, and a plan comes back from its link as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest

from app import plan_links, state
from app.plan_links import document_of, packed, query_of_document, read_link, set_of, unpacked
from planner.errors import PlanError
from planner.plan import default_plan, parse_plan


def test_a_link_says_what_the_address_of_a_page_says() -> None:
    assert read_link(" http://host:8501/ledger?seq=8192&zero=1&run_states=done ") == {
        "seq": "8192",
        "zero": "1",
    }
    assert read_link("?model=Qwen%2FQwen3-8B") == {"model": "Qwen/Qwen3-8B"}
    assert read_link("micro_batch=2") == {"micro_batch": "2"}
    assert read_link("http://host/run?run=0123") == {"run": "0123"}
    # All defaults: the plan that a new page starts from.
    assert read_link("http://host:8501/") == {}


@pytest.mark.parametrize("text", ["", "   ", "hello", "http://host/?colour=red", "x" * 20_001])
def test_a_text_that_is_no_link_of_ours_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^The link cannot be used: .* a comparison or a run\.$"):
        read_link(text)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"seq": "long"}, "seq is 'long': it must be a whole number."),
        ({"packed": "perhaps"}, "packed is 'perhaps': it must be true or false."),
        ({"utilization": "nan"}, "utilization is nan|utilization is 'nan'"),
        ({"source": "memory"}, "source is 'memory': it must be preset, config or hub."),
        ({"source": "config", "config": "rubbish"}, "config is missing from the link or damaged"),
        ({"tie_word_embeddings": "maybe"}, "one of as in the config, tied, untied"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(query: dict[str, str], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        document_of(query)


PLANS: list[dict[str, Any]] = [
    {"model": {"preset": "Qwen/Qwen3-8B"}, "workload": {"lora_rank": 8}},
    {
        "model": {"preset": "Qwen/Qwen3-8B", "overrides": {"num_hidden_layers": 4}},
        "parallelism": {"tensor_parallel": 2, "world_size": 2},
    },
    {"model": {"preset": "Qwen/Qwen3-8B"}, "job": "serve", "workload": {"kv_dtype": "fp8"}},
]


@pytest.mark.parametrize("given", PLANS)
def test_a_plan_comes_back_from_its_link(given: dict[str, Any]) -> None:
    plan = parse_plan({"hardware": {"preset": "h200"}, **given})
    document = plan.to_dict()
    link = packed(query_of_document(document, state.values_of_plan(document)))
    assert parse_plan(document_of(unpacked(link))) == plan


def test_a_set_keeps_its_order_and_its_plans() -> None:
    plans = ["seq=1024", "", "zero=1&seq=2048"]
    query = {"unit": "GB", **plan_links.set_query(plans)}
    assert set_of(query) == plans
    assert set_of({"plan_10": "c", "plan_9": "b", "plan_x": "no", "plan_1": "a"}) == ["a", "b", "c"]


def test_a_hub_model_is_fetched_by_the_given_function() -> None:
    config = {"model_type": "llama"}
    document = document_of({"source": "hub", "hub": "a/b"}, {"a/b": config}.__getitem__)
    assert document["model"] == {"config": config, "name": "a/b"}


def test_a_configuration_that_no_link_can_carry_is_refused() -> None:
    noise = random.Random(0).randbytes(6000).hex()
    document = {**default_plan().to_dict()}
    document["model"] = {"config": {"model_type": noise}, "name": "x"}
    with pytest.raises(PlanError, match="too long for a link"):
        query_of_document(document, {})
