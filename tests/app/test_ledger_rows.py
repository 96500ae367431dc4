"""The ledger as rows: shapes in numbers, and a filter that only takes away."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from app import services
from app.ledger_rows import ledger_rows, matching
from planner.plan import default_plan


def rows() -> list[dict[str, Any]]:
    return ledger_rows(services.prediction_of(default_plan()))


def named(name: str) -> dict[str, Any]:
    return next(row for row in rows() if row["name"] == name)


def test_rows_sum_to_the_allocated_peak() -> None:
    memory = services.prediction_of(default_plan())["memory"]
    assert sum(row["bytes"] for row in rows()) == memory["allocated_bytes"]
    assert [row["bytes"] for row in rows()] == sorted((r["bytes"] for r in rows()), reverse=True)


def test_symbols_of_a_shape_become_the_plans_numbers() -> None:
    # Llama-3.1-8B at 1 x 4096 tokens: inner size 14,336, vocabulary 128,256, fp32.
    softmax = named("loss: (_log_softmax)")
    assert softmax["shape_text"] == "4,096 × 128,256"
    assert softmax["bytes"] == 4096 * 128256 * 4


def test_filters_narrow_by_phase_component_and_words() -> None:
    every = rows()
    assert matching(every, [], [], "") == every
    assert {row["component"] for row in matching(every, [], ["logits"], "")} == {"logits"}
    stepping = matching(every, ["optimizer"], [], "")
    assert stepping and not any(row["owner"] == "saved for backward" for row in stepping)
    assert all("float32" in row["dtype"] for row in matching(every, [], [], "MASTER float32"))
    assert matching(every, [], [], "no such tensor") == []


def test_what_belongs_to_the_running_operation_is_alive_at_the_peak_only() -> None:
    memory = services.prediction_of(default_plan())["memory"]
    running = [row for row in rows() if row["owner"] == "running operation"]
    assert running and {row["phases"] for row in running} == {memory["peak_phase"]}


def test_a_served_models_rows_are_those_of_its_peak() -> None:
    document = {**default_plan().to_dict(), "job": "serve", "workload": {}}
    prediction = services.prediction_of(services.check_plan(document))
    found = ledger_rows(prediction)
    assert sum(row["bytes"] for row in found) == prediction["memory"]["allocated_bytes"]
    assert all("prefill" in row["phases"] for row in found)


ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4, "int64": 8, "complex64": 8, "bool": 1}


@pytest.mark.parametrize(
    ("model", "workload"),
    [
        ("meta-llama/Llama-3.2-1B", {"lora_rank": 8}),
        ("Qwen/Qwen3-0.6B", {"attention": "eager", "checkpointing": "selective"}),
        ("microsoft/Phi-3-mini-4k-instruct", {}),
        ("mistralai/Mixtral-8x7B-v0.1", {"precision": "autocast"}),
        ("tiiuae/falcon-7b", {"attention": "eager", "micro_batch": 2}),
        ("deepseek-ai/DeepSeek-V2-Lite", {}),
        ("deepseek-ai/DeepSeek-V2-Lite", {"attention": "eager", "precision": "autocast"}),
        ("openai/gpt-oss-20b", {"attention": "eager"}),
    ],
)
def test_the_numbers_of_a_shape_multiply_to_its_bytes(model: str, workload: dict[str, Any]) -> None:
    """A side that is the traced small model's own size, or a mere symbol, would not."""
    document = default_plan().to_dict()
    document |= {
        "model": {"preset": model},
        "workload": {"sequence_length": 2048, **workload},
        "parallelism": {"engine": "peakmark", "zero_stage": 3, "world_size": 64},
    }
    saved = [
        row
        for row in ledger_rows(services.prediction_of(services.check_plan(document)))
        if row["owner"] == "saved for backward" and row["shape"]
    ]
    assert saved
    for row in saved:
        elements = prod(int(side.replace(",", "")) for side in row["shape_text"].split(" × "))
        assert elements * ELEMENT_BYTES[row["dtype"]] * row["count"] == row["bytes"], row["name"]
