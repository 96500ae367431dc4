"""Rare choices in few words, and silence about defaults."""

from __future__ import annotations

from app.plan_words import checkpointing_words, split_words, variant_words
from planner.plan import default_plan


def test_defaults_are_not_mentioned() -> None:
    plan = default_plan().to_dict()
    assert variant_words(plan["workload"]) == []
    assert split_words(plan["parallelism"]) == ""
    assert checkpointing_words({"checkpointing": "none"}) == "none"


def test_what_is_chosen_is_said() -> None:
    workload = {"loss": "fused_linear", "lora_rank": 16, "lora_targets": "qv", "base_dtype": "nf4"}
    assert variant_words(workload) == ["fused linear loss", "LoRA 16 of q and v on nf4"]
    assert variant_words({"sync_each_micro_batch": False}) == ["reduced once per step"]
    split = {"tensor_parallel": 2, "pipeline_parallel": 4, "sequence_parallel": True}
    assert split_words(split) == " × TP 2 × PP 4 × SP"
    every = {"checkpointing": "full", "checkpoint_every": 2}
    assert checkpointing_words(every) == "full every 2 layers"
