"""A step that has not been traced: the refusal names a choice, and what it allows can be planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.obstacles import check_training
from planner.plan import parse_plan
from planner.predict import predict
from planner.presets import resolve_model
from planner.untraced import untraced
from planner.workload import Checkpointing, Loss, Parallelism, TrainingWorkload

EXPERTS_BETWEEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mlp_only_layers": [0, 2],
}


SHARDED = {"engine": "peakmark", "zero_stage": 3, "world_size": 8}


def predicted(model: dict[str, Any], parallelism: dict[str, Any] = SHARDED, **workload: Any) -> int:
    plan = {
        "schema": 1,
        "job": "train",
        "model": model,
        "workload": {"sequence_length": 256, **workload},
        "parallelism": parallelism,
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    return int(predict(parse_plan(plan)).to_dict()["memory"]["allocated_bytes"])


def refusal(model: dict[str, Any], **chosen: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        predicted(model, **chosen)
    return caught.value


def test_frozen_layers_that_are_not_traced_are_answered_by_those_that_are() -> None:
    # Qwen3-8B has 36 layers: with 35 frozen, the last is the only one that trains.
    qwen = {"preset": "Qwen/Qwen3-8B"}
    error = refusal(qwen, frozen_layers=35)
    assert (error.field, error.value, error.allowed) == ("workload.frozen_layers", 35, "0 to 34")
    assert "workload.checkpointing full or selective" in str(error)
    assert predicted(qwen, frozen_layers=34) < predicted(qwen)
    assert predicted(qwen, frozen_layers=35, checkpointing="full") > 0


def test_a_loss_that_is_not_traced_is_named() -> None:
    gpt_oss = resolve_model("openai/gpt-oss-20b")
    workload = TrainingWorkload(loss=Loss.CHUNKED, sequence_length=256)

    def works(other: TrainingWorkload) -> bool:
        return other.loss is Loss.HF

    error = untraced(gpt_oss, workload, works)
    assert (error.field, error.value, error.allowed) == ("workload.loss", "chunked", "hf")


def test_two_choices_that_help_only_together_are_both_named() -> None:
    model = resolve_model("Qwen/Qwen3-8B")
    workload = TrainingWorkload(frozen_layers=5, lora_rank=8)

    def works(other: TrainingWorkload) -> bool:
        return not other.frozen_layers and not other.lora_rank

    error = untraced(model, workload, works)
    assert str(error) == (
        "workload.lora_rank is 8 and workload.frozen_layers is 5: a training step of qwen3 with "
        "these together has not been traced; use lora_rank 0 and frozen_layers 0."
    )


def test_where_no_choice_helps_the_model_is_named() -> None:
    model = resolve_model("Qwen/Qwen3-8B")
    error = untraced(model, TrainingWorkload(), lambda other: False)
    assert error.field == "model"
    assert "36 layers in its order of kinds (plain) has not been traced" in str(error)


def test_an_order_of_layers_is_refused_before_it_is_predicted() -> None:
    """What only the walk through the whole step finds is found by the check too."""
    spec = spec_from_config(EXPERTS_BETWEEN, name="between")
    workload = TrainingWorkload(sequence_length=256)
    with pytest.raises(PlanError, match=r"workload.checkpointing is 'none': .* use full or sel"):
        check_training(spec, workload, Parallelism())
    check_training(spec, replace(workload, checkpointing=Checkpointing.FULL), Parallelism())
    assert predicted({"config": EXPERTS_BETWEEN, "name": "between"}, checkpointing="full") > 0


ADAPTED = {"lora_rank": 8}
QLORA = {**ADAPTED, "base_dtype": "nf4"}
LLAMA, GEMMA_2, GEMMA_3 = "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "google/gemma-3-4b-it"


@pytest.mark.parametrize(
    ("preset", "chosen", "allowed"),
    [
        (LLAMA, {**ADAPTED, "precision": "fp32"}, "workload.precision bf16 or autocast"),
        (LLAMA, {**ADAPTED, "attention": "eager"}, "workload.attention sdpa or triton"),
        (
            LLAMA,
            {**ADAPTED, "precision": "autocast", "loss": "chunked"},
            "workload.loss hf, or workload.precision bf16",
        ),
        (
            LLAMA,
            {**ADAPTED, "precision": "autocast", "checkpointing": "selective"},
            "workload.checkpointing none or full, or workload.precision bf16",
        ),
        (LLAMA, {**QLORA, "checkpointing": "selective"}, "workload.checkpointing none or full"),
        ("mistralai/Mixtral-8x7B-v0.1", QLORA, "as_precision"),
        ("microsoft/phi-4", {**QLORA, "precision": "autocast"}, "workload.precision bf16"),
        ("microsoft/phi-4", {"packed": True}, "False"),
        (GEMMA_2, {"frozen_layers": 4, "attention": "eager"}, "0"),
        (
            GEMMA_3,
            {"frozen_layers": 4, "sequence_length": 2048},
            "0, or workload.attention triton",
        ),
        (GEMMA_3, {"checkpoint_every": 2, "checkpointing": "full"}, "1"),
        (
            "openai/gpt-oss-20b",
            {"checkpointing": "selective", "attention": "eager"},
            "none or full",
        ),
        ("deepseek-ai/DeepSeek-V2-Lite", {"frozen_layers": 4}, "0"),
    ],
)
def test_what_has_not_been_traced_is_refused_with_what_has(
    preset: str, chosen: dict[str, Any], allowed: str
) -> None:
    workload = {"precision": "bf16", **chosen}
    ddp = {"engine": "ddp", "zero_stage": 0, "world_size": 1}
    sentence = str(refusal({"preset": preset}, parallelism=ddp, **workload))
    assert "has not been traced; use " in sentence
    assert allowed in sentence.split("; use ")[1]
