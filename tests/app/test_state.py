"""From widget values to a plan and back, and through the URL."""

from __future__ import annotations

import json

import pytest

from app import state
from planner.plan import default_plan, parse_plan


def test_the_defaults_are_the_planners_default_plan() -> None:
    values = state.values_from({}, {})
    document = state.plan_mapping(values, {"preset": values["model"]}, {"preset": values["gpu"]})
    assert parse_plan(document) == default_plan()


def test_a_widget_wins_over_the_url_and_the_url_over_the_default() -> None:
    values = state.values_from({"seq": 512}, {"seq": "1024", "micro_batch": "3"})
    assert (values["seq"], values["micro_batch"], values["gpus"]) == (512, 3, 8)


@pytest.mark.parametrize("text", ["", "nan", "many", "1e400", "0x10"])
def test_a_number_in_the_url_that_is_none_gives_the_default(text: str) -> None:
    assert state.values_from({}, {"seq": text})["seq"] == 4096


def test_a_plan_comes_back_from_its_own_url() -> None:
    document = default_plan().to_dict()
    document["workload"] |= {"sequence_length": 2048, "attention": "eager"}
    document["parallelism"] |= {"zero_stage": 1, "world_size": 64}
    document["model"]["overrides"] = {"num_hidden_layers": 4, "tie_word_embeddings": True}
    plan = parse_plan(document)
    query = state.query_of_plan(plan.to_dict())
    assert query == {
        "seq": "2048",
        "attention": "eager",
        "zero": "1",
        "gpus": "64",
        "num_hidden_layers": "4",
        "tie_word_embeddings": "tied",
    }
    values = state.values_from({}, query)
    again = state.plan_mapping(values, {"preset": values["model"]}, {"preset": values["gpu"]})
    assert parse_plan(again) == plan


def test_a_serving_plan_and_a_custom_gpu_come_back() -> None:
    custom = {
        "name": "custom GPU",
        "visible_bytes": 24 * 2**30,
        "mem_bandwidth_bytes_s": 10**12,
        "peak_dense_flop_s": {"bf16": 10**14},
        "interconnect_bytes_s": 10**10,
    }
    document = {
        "job": "serve",
        "model": {"preset": "Qwen/Qwen3-8B"},
        "workload": {"context_length": 1000, "kv_dtype": "fp8"},
        "hardware": {"custom": custom},
    }
    plan = parse_plan(document)
    values = state.values_from({}, state.query_of_plan(plan.to_dict()))
    hardware = state.custom_hardware(values)
    assert parse_plan(state.plan_mapping(values, {"preset": values["model"]}, hardware)) == plan


def test_a_config_survives_the_url_and_a_long_one_is_not_carried() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "name": "käse"}
    packed = state.pack_config(config)
    assert packed is not None
    assert json.loads(state.unpack_config(packed) or "") == config
    unlike = {f"key{i}": f"{i * 7919 % 10007:x}" for i in range(3000)}
    assert state.pack_config(unlike) is None


@pytest.mark.parametrize("packed", ["", "A", "not base64 ~", "x" * 100_000])
def test_a_damaged_config_in_the_url_is_none(packed: str) -> None:
    assert state.unpack_config(packed) is None


def test_a_custom_gpu_keeps_what_is_no_number_for_the_planner_to_refuse() -> None:
    values = {**state.DEFAULTS, "gpu_gib": float("nan"), "gpu_tb_s": None}
    custom = state.custom_hardware(values)["custom"]
    assert custom["visible_bytes"] != custom["visible_bytes"]
    assert custom["mem_bandwidth_bytes_s"] is None


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("yes", False)])
def test_a_switch_in_the_url_is_true_or_false(text: str, value: bool) -> None:
    assert state.values_from({}, {"packed": text})["packed"] is value


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "x"])
def test_what_is_no_number_in_the_url_is_the_default(text: str) -> None:
    assert state.values_from({}, {"max_grad_norm": text})["max_grad_norm"] == 0.0


def test_rare_choices_go_to_the_plan_and_come_back_from_its_url() -> None:
    chosen = {"lora_rank": 8, "loss": "chunked", "sync_each_micro_batch": False, "packed": True}
    split = {"tensor_parallel": 2, "sequence_parallel": True}
    values = {**state.DEFAULTS, **chosen, **split}
    document = state.plan_mapping(values, {"preset": "x"}, {"preset": "y"})
    assert {key: document["workload"][key] for key in chosen} == chosen
    assert {key: document["parallelism"][key] for key in split} == split
    query = state.query_of_values(state.values_of_plan(document))
    assert query["sync_each_micro_batch"] == "false" and query["sequence_parallel"] == "true"
    back = state.values_from({}, query)
    assert {key: back[key] for key in (*chosen, *split)} == {**chosen, **split}


def test_serving_plans_are_not_split() -> None:
    values = {**state.DEFAULTS, "job": "serve", "tensor_parallel": 4}
    assert "tensor_parallel" not in state.plan_mapping(values, {}, {})["parallelism"]
