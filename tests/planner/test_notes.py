"""What a training prediction says in words of single families."""

from __future__ import annotations

from planner.memory.training import attention_notes, routing_notes
from planner.presets import resolve_model
from planner.workload import Attention, TrainingWorkload


def test_falcon_says_that_sdpa_keeps_its_scores() -> None:
    falcon = resolve_model("falcon-7b")
    (note,) = attention_notes(falcon, TrainingWorkload(attention=Attention.SDPA))
    assert "keeps the scores in fp32" in note
    assert attention_notes(falcon, TrainingWorkload(attention=Attention.EAGER)) == ()


def test_mixtures_say_what_routing_changes() -> None:
    (note,) = routing_notes(resolve_model("qwen3-30b-a3b"))
    assert "tokens x 8 rows" in note
    assert routing_notes(resolve_model("llama-3.1-8b")) == ()
