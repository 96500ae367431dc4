"""A plan's JSON: read, checked, written back."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plan import Job, default_plan, parse_plan, plan_hash
from planner.workload import Attention, Optimizer, ServingWorkload, TrainingWorkload

TRAIN: dict[str, Any] = {
    "schema": 1,
    "job": "train",
    "model": {"preset": "meta-llama/Llama-3.1-8B"},
    "workload": {
        "sequence_length": 4096,
        "micro_batch": 1,
        "grad_accumulation": 1,
        "optimizer": "adamw_fused",
        "precision": "mixed",
        "attention": "sdpa",
        "checkpointing": "none",
    },
    "parallelism": {"engine": "peakmark", "zero_stage": 3, "world_size": 8},
    "hardware": {"preset": "h200-sxm5-141gb"},
}
SERVE: dict[str, Any] = {
    "schema": 1,
    "job": "serve",
    "model": {"preset": "Qwen/Qwen3-8B"},
    "workload": {
        "context_length": 8192,
        "sequences": 8,
        "weights_dtype": "fp8",
        "kv_dtype": "bf16",
        "utilization": 0.9,
    },
    "parallelism": {"engine": "peakmark", "zero_stage": 3, "world_size": 8},
    "hardware": {"preset": "h200-sxm5-141gb"},
}


def edited(base: dict[str, Any], part: str, **edits: Any) -> dict[str, Any]:
    """Return a deep copy of a plan with fields of one part replaced."""
    plan = copy.deepcopy(base)
    plan[part] = {**plan[part], **edits}
    return plan


def refusal(mapping: Any) -> PlanError:
    """Return the error that a plan gives."""
    with pytest.raises(PlanError) as caught:
        parse_plan(mapping)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("document", [TRAIN, SERVE])
def test_a_full_plan_is_written_back_as_it_was_read(document: dict[str, Any]) -> None:
    plan = parse_plan(document)
    assert plan.to_dict() == document
    assert parse_plan(json.loads(json.dumps(plan.to_dict()))) == plan


def test_absent_fields_take_the_defaults_and_short_names_become_ids() -> None:
    plan = parse_plan({"model": {"preset": "llama-3.1-8b"}, "hardware": {"preset": "h200"}})
    assert plan == default_plan()
    assert plan.to_dict() == TRAIN
    assert plan.job is Job.TRAIN
    assert isinstance(plan.workload, TrainingWorkload)
    assert plan.workload.optimizer is Optimizer.ADAMW_FUSED
    assert isinstance(parse_plan(SERVE).workload, ServingWorkload)


def test_equal_plans_have_equal_hashes_whatever_the_order_of_their_fields() -> None:
    shuffled = dict(reversed(TRAIN.items()))
    assert plan_hash(parse_plan(shuffled)) == plan_hash(parse_plan(TRAIN))
    other = edited(TRAIN, "workload", micro_batch=2)
    assert plan_hash(parse_plan(other)) != plan_hash(parse_plan(TRAIN))
    assert len(plan_hash(parse_plan(TRAIN))) == 64


def test_a_model_by_configuration_keeps_configuration_name_and_edits() -> None:
    model = {
        "config": {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 100,
            "attn_pdrop": 0.1,
        },
        "name": "tiny",
        "overrides": {"n_layer": 3},
    }
    plan = parse_plan({**TRAIN, "model": model, "workload": {"sequence_length": 512}})
    assert plan.model.num_layers == 3
    assert plan.to_dict()["model"] == model
    assert parse_plan(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("workload", "sequence_length", 0),
        ("workload", "sequence_length", 2**24 + 1),
        ("workload", "sequence_length", "4096"),
        ("workload", "sequence_length", 4096.0),
        ("workload", "sequence_length", math.nan),
        ("workload", "micro_batch", -1),
        ("workload", "micro_batch", 65537),
        ("workload", "micro_batch", True),
        ("workload", "micro_batch", None),
        ("workload", "micro_batch", 10**4_000),
        ("workload", "grad_accumulation", 0),
        ("workload", "optimizer", "adam"),
        ("workload", "precision", "fp16"),
        ("workload", "attention", ""),
        ("workload", "checkpointing", False),
        ("parallelism", "engine", "megatron"),
        ("parallelism", "zero_stage", 4),
        ("parallelism", "world_size", 0),
        ("parallelism", "world_size", 65537),
    ],
)
def test_every_field_out_of_range_is_named(part: str, key: str, value: Any) -> None:
    error = refusal(edited(TRAIN, part, **{key: value}))
    assert error.field == f"{part}.{key}"
    assert str(error).startswith(f"{part}.{key} is ")
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context_length", 0),
        ("sequences", 65537),
        ("weights_dtype", "fp4"),
        ("kv_dtype", "int4"),
        ("utilization", 0),
        ("utilization", 1.5),
        ("utilization", math.nan),
        ("utilization", "0.9"),
    ],
)
def test_every_serving_field_out_of_range_is_named(key: str, value: Any) -> None:
    assert refusal(edited(SERVE, "workload", **{key: value})).field == f"workload.{key}"


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "plan",
        {},
        {**TRAIN, "schema": 2},
        {**TRAIN, "job": "finetune"},
        {**TRAIN, "extra": 1},
        {**TRAIN, "model": {}},
        {**TRAIN, "model": {"preset": "gpt2", "config": {}}},
        {**TRAIN, "model": {"preset": 3}},
        {**TRAIN, "model": {"config": []}},
        {**TRAIN, "model": {"preset": "gpt2", "overrides": 3}},
        {**TRAIN, "hardware": {}},
        {**TRAIN, "hardware": None},
        {**TRAIN, "workload": []},
        {**TRAIN, "parallelism": "zero"},
        {key: value for key, value in TRAIN.items() if key != "model"},
        {key: value for key, value in TRAIN.items() if key != "hardware"},
    ],
)
def test_a_malformed_plan_is_one_sentence(document: Any) -> None:
    assert str(refusal(document)).endswith((".", "?"))


@pytest.mark.parametrize("stage", [0, 1])
def test_fsdp2_has_no_stage_below_two(stage: int) -> None:
    error = refusal(edited(TRAIN, "parallelism", engine="fsdp2", zero_stage=stage))
    assert error.field == "parallelism.zero_stage"
    assert "stage 2" in str(error)
    parse_plan(edited(TRAIN, "parallelism", engine="fsdp2", zero_stage=stage + 2))


def test_our_kernel_is_refused_where_it_cannot_compute_the_model_s_attention() -> None:
    triton = edited(TRAIN, "workload", attention="triton")
    plan = parse_plan(triton)
    assert isinstance(plan.workload, TrainingWorkload)
    assert plan.workload.attention is Attention.TRITON
    gemma = {**triton, "model": {"preset": "google/gemma-2-2b"}}
    assert "no step with capped attention logits, which this model has, has been" in str(
        refusal(gemma)
    )
    mistral = {**triton, "model": {"preset": "mistralai/Mistral-7B-v0.1"}}
    parse_plan(edited(mistral, "workload", sequence_length=4097))
    packed = edited(mistral, "workload", packed=True)
    assert "no step with several documents in a row has been traced" in str(refusal(packed))
    wide = {"preset": "meta-llama/Llama-3.1-8B", "overrides": {"head_dim": 258}}
    assert "largest head size is 256" in str(refusal({**triton, "model": wide}))


def test_gemma2_needs_eager_attention() -> None:
    gemma = {**TRAIN, "model": {"preset": "google/gemma-2-2b"}}
    error = refusal(gemma)
    assert (error.field, error.allowed) == ("workload.attention", "eager")
    parse_plan(edited(gemma, "workload", attention="eager"))


def test_learned_positions_end_where_their_table_ends() -> None:
    gpt2 = {**TRAIN, "model": {"preset": "gpt2"}}
    error = refusal(edited(gpt2, "workload", sequence_length=1025))
    assert error.field == "workload.sequence_length"
    assert "at most 1024" in str(error)
    parse_plan(edited(gpt2, "workload", sequence_length=1024))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=10,
)
FIELDS = [
    (part, key) for part in ("workload", "parallelism", "model", "hardware") for key in TRAIN[part]
]


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_json_gives_a_plan_or_a_plan_error(document: Any) -> None:
    with pytest.raises(PlanError):
        parse_plan(document)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FIELDS), JSON)
def test_any_value_of_any_field_gives_a_plan_or_a_plan_error(
    place: tuple[str, str], value: Any
) -> None:
    part, key = place
    try:
        plan = parse_plan(edited(TRAIN, part, **{key: value}))
    except PlanError as error:
        assert "\n" not in str(error)
    else:
        assert parse_plan(plan.to_dict()) == plan


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(TRAIN)), JSON)
def test_any_value_of_any_part_gives_a_plan_or_a_plan_error(part: str, value: Any) -> None:
    try:
        parse_plan({**TRAIN, part: value})
    except PlanError as error:
        assert "\n" not in str(error)
