"""What cannot be split is refused with one sentence that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlanError
from planner.plan import parse_plan
from planner.presets import resolve_model
from planner.search import grid
from planner.splits import check_splits
from planner.workload import Attention, Engine, Parallelism, Precision, TrainingWorkload

LLAMA = "meta-llama/Llama-3.1-8B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


@pytest.mark.parametrize(
    ("name", "workload", "parallelism", "words"),
    [
        (LLAMA, {}, {"tensor_parallel": 3}, "32 attention heads cannot be divided"),
        (LLAMA, {}, {"tensor_parallel": 64}, "32 attention heads"),
        ("Qwen/Qwen2.5-7B", {}, {"tensor_parallel": 14}, "18,944 MLP columns"),
        ("Qwen/Qwen2.5-0.5B", {}, {"tensor_parallel": 7}, "4,864 MLP columns"),
        ("openai-community/gpt2", {}, {"tensor_parallel": 2}, "how gpt2 divides"),
        (LLAMA, {}, {"sequence_parallel": True}, "needs tensor_parallel above 1"),
        (
            LLAMA,
            {"sequence_length": 1001},
            {"tensor_parallel": 2, "sequence_parallel": True},
            "1,001 tokens cannot be divided",
        ),
        (LLAMA, {}, {"pipeline_parallel": 33}, "32 layers, and a stage needs one"),
        (LLAMA, {"frozen_layers": 2}, {"pipeline_parallel": 2}, "frozen_layers"),
        (LLAMA, {"sequence_length": 1001}, {"context_parallel": 2}, "1,001 tokens"),
        (LLAMA, {"attention": Attention.EAGER}, {"context_parallel": 2}, "keeps no scores"),
        (LLAMA, {"precision": Precision.FP32}, {"context_parallel": 2}, "no fused kernel"),
        (LLAMA, {"packed": True}, {"context_parallel": 2}, "packed rows"),
        (LLAMA, {}, {"expert_parallel": 2}, "no experts"),
        (MIXTRAL, {}, {"expert_parallel": 3, "world_size": 9}, "8 experts cannot be divided"),
        (MIXTRAL, {}, {"expert_parallel": 4, "world_size": 6}, "6 cannot be divided by it"),
        (MIXTRAL, {}, {"expert_parallel": 2, "engine": Engine.FSDP2}, "engine peakmark"),
        (LLAMA, {}, {"tensor_parallel": 2, "engine": Engine.DDP}, "not ddp"),
        (LLAMA, {"lora_rank": 8}, {"context_parallel": 2}, "adapters"),
    ],
)
def test_one_sentence_says_what_cannot_be_split(
    name: str, workload: dict[str, Any], parallelism: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        check_splits(resolve_model(name), TrainingWorkload(**workload), Parallelism(**parallelism))
    sentence = str(caught.value)
    assert words in sentence
    assert sentence.startswith(f"{caught.value.field} is ")
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("name", "parallelism"),
    [
        (LLAMA, {"tensor_parallel": 8, "sequence_parallel": True, "pipeline_parallel": 32}),
        (LLAMA, {"tensor_parallel": 32, "context_parallel": 4, "engine": Engine.FSDP2}),
        (MIXTRAL, {"expert_parallel": 8, "world_size": 16, "tensor_parallel": 2}),
        ("openai-community/gpt2", {"pipeline_parallel": 5, "context_parallel": 2}),
    ],
)
def test_what_divides_passes(name: str, parallelism: dict[str, Any]) -> None:
    check_splits(resolve_model(name), TrainingWorkload(), Parallelism(**parallelism))


def test_a_serving_plan_splits_no_model() -> None:
    plan = {
        "job": "serve",
        "model": {"preset": LLAMA},
        "hardware": {"preset": "h200"},
        "parallelism": {"tensor_parallel": 2},
    }
    with pytest.raises(PlanError, match=r"^parallelism.tensor_parallel is 2: a serving plan"):
        parse_plan(plan)


def test_a_grid_over_world_sizes_refuses_those_that_experts_do_not_divide() -> None:
    plan = parse_plan(
        {
            "model": {"preset": MIXTRAL},
            "hardware": {"preset": "h200"},
            "parallelism": {"expert_parallel": 4, "world_size": 8},
        }
    )
    with pytest.raises(PlanError, match="2 cannot be divided by it"):
        grid(plan, world_sizes=(4, 2))
