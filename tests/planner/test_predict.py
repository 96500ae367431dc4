"""The whole answer to a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plan import parse_plan
from planner.predict import PLANNER_VERSION, describe_model, predict
from planner.presets import model_presets, resolve_model
from planner.workload import Checkpointing, Engine, Optimizer, Precision

TRAIN: dict[str, Any] = {
    "schema": 1,
    "job": "train",
    "model": {"preset": "llama-3.1-8b"},
    "hardware": {"preset": "h200"},
}


def answer(document: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction after a trip through strict JSON."""
    text = json.dumps(predict(parse_plan(document)).to_dict(), allow_nan=False)
    data: dict[str, Any] = json.loads(text)
    return data


def check_sums(data: dict[str, Any]) -> None:
    """Assert that parts sum to totals in a prediction."""
    memory = data["memory"]
    for phase in memory["phases"]:
        assert sum(phase["parts"].values()) == phase["allocated_bytes"]
    peak = max(phase["allocated_bytes"] for phase in memory["phases"])
    assert memory["allocated_bytes"] == peak
    assert sum(row["bytes"] for row in memory["components"]) == peak
    overheads = sum(row["bytes"] for row in memory["overheads"])
    assert memory["device_bytes"] == peak + overheads
    assert data["verdict"]["needed_bytes"] == memory["device_bytes"]
    speed = data["throughput"]
    parts_s = sum(part["time_s"] for part in speed["operations"])
    assert speed["step_time_s"] == pytest.approx(parts_s)


def test_a_training_prediction_has_the_agreed_form() -> None:
    data = answer(TRAIN)
    assert list(data) == [
        "schema",
        "planner_version",
        "plan",
        "model",
        "memory",
        "verdict",
        "throughput",
        "serving",
        "notes",
    ]
    assert (data["schema"], data["planner_version"]) == (1, PLANNER_VERSION)
    assert data["serving"] is None
    assert parse_plan(data["plan"]) == parse_plan(TRAIN)
    assert data["verdict"]["capacity_bytes"] == 150_109_880_320
    check_sums(data)


def test_a_serving_prediction_has_the_same_form_and_its_own_part() -> None:
    data = answer({**TRAIN, "job": "serve", "parallelism": {"world_size": 4}})
    assert data["serving"]["kv_bytes_per_token"] == 131_072
    assert data["serving"]["replicas"] == 4
    assert data["verdict"]["capacity_bytes"] == int(0.9 * 150_109_880_320)
    assert [phase["name"] for phase in data["memory"]["phases"]] == ["prefill", "decode"]
    check_sums(data)


def test_notes_say_what_was_noticed() -> None:
    long = answer({**TRAIN, "workload": {"sequence_length": 200_000}})
    assert any("131,072" in note for note in long["notes"])
    gpt2 = answer({**TRAIN, "model": {"preset": "gpt2"}, "workload": {"sequence_length": 512}})
    assert any("dropout" in note for note in gpt2["notes"])
    far = answer({**TRAIN, "parallelism": {"world_size": 64}})
    assert any("network port" in note for note in far["notes"])


def test_the_model_is_described_with_what_follows_from_it() -> None:
    data = describe_model(resolve_model("llama-3.1-8b"))
    assert data["parameters"] == 8_030_261_248
    assert data["embedding_parameters"] == 128256 * 4096
    assert data["head_parameters"] == 128256 * 4096 + 4096
    groups = ("embedding_parameters", "layer_parameters", "head_parameters")
    assert sum(data[name] for name in groups) == data["parameters"]
    assert (data["query_size"], data["kv_size"]) == (4096, 1024)


@pytest.mark.parametrize("preset", [preset.id for preset in model_presets()])
def test_every_preset_has_a_training_and_a_serving_prediction(preset: str) -> None:
    attention = "eager" if "gemma-2" in preset or "gpt-oss" in preset else "sdpa"
    document = {
        **TRAIN,
        "model": {"preset": preset},
        "workload": {"sequence_length": 1024, "attention": attention},
        "parallelism": {"zero_stage": 2, "world_size": 64},
    }
    check_sums(answer(document))
    check_sums(answer({**document, "job": "serve", "workload": {"context_length": 1024}}))


CHOICES = st.fixed_dictionaries(
    {
        "sequence_length": st.sampled_from((1, 2, 1000, 4096, 2**24)),
        "micro_batch": st.sampled_from((1, 3, 65536)),
        "grad_accumulation": st.sampled_from((1, 65536)),
        "optimizer": st.sampled_from([str(choice) for choice in Optimizer]),
        "precision": st.sampled_from([str(choice) for choice in Precision]),
        "attention": st.sampled_from(("eager", "sdpa", "triton")),
        "checkpointing": st.sampled_from([str(choice) for choice in Checkpointing]),
    }
)
PARALLELISM = st.fixed_dictionaries(
    {
        "engine": st.sampled_from([str(choice) for choice in Engine]),
        "zero_stage": st.integers(0, 3),
        "world_size": st.sampled_from((1, 2, 7, 64, 65536)),
    }
)
MODELS = st.sampled_from(
    ("llama-3.1-8b", "gpt2-xl", "mixtral-8x22b", "gemma-2-27b", "phi-4", "qwen3-14b")
)


# What 65,536 ranks gather for 65,536 micro-batches passes 2^63 bytes.
HUGE = {"sequence_length": 1, "micro_batch": 1, "grad_accumulation": 65536, "attention": "eager"}


@example("mixtral-8x22b", HUGE, {"engine": "fsdp2", "zero_stage": 2, "world_size": 65536}, "h200")
@settings(max_examples=150, deadline=None)
@given(MODELS, CHOICES, PARALLELISM, st.sampled_from(("h200", "t4", "mi300x", "rtx-4090")))
def test_any_plan_is_answered_or_refused_and_its_parts_sum_up(
    model: str, workload: dict[str, Any], parallelism: dict[str, Any], gpu: str
) -> None:
    document = {
        **TRAIN,
        "model": {"preset": model},
        "workload": workload,
        "parallelism": parallelism,
        "hardware": {"preset": gpu},
    }
    try:
        data = answer(document)
    except PlanError:
        return
    check_sums(data)
    assert data["memory"]["allocated_bytes"] > 0


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 64),
    st.integers(1, 20_000),
    st.sampled_from(("eager", "sdpa", "triton")),
    st.sampled_from(("none", "full")),
    st.integers(0, 3),
)
def test_more_rows_and_longer_rows_never_need_less(
    b: int, s: int, attention: str, checkpointing: str, stage: int
) -> None:
    def needed_bytes(b: int, s: int) -> int:
        workload = {
            "micro_batch": b,
            "sequence_length": s,
            "attention": attention,
            "checkpointing": checkpointing,
        }
        document = {**TRAIN, "workload": workload, "parallelism": {"zero_stage": stage}}
        # By the formulas: which blocks the allocator reuses does not grow with every token.
        plan = parse_plan(document)
        return int(predict(plan, segment_share=0.12).to_dict()["memory"]["device_bytes"])

    base = needed_bytes(b, s)
    assert needed_bytes(b + 1, s) >= base
    assert needed_bytes(b, s + 1) >= base
