"""Which attentions a model can be trained with, and lengths that learned positions bound."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from planner.errors import PlanError
from planner.obstacles import check_length, check_training
from planner.presets import resolve_model
from planner.workload import Attention, Parallelism, TrainingWorkload


def refusal(name: str, attention: Attention, length: int = 1024) -> str | None:
    """Return why a model cannot be trained with an attention, or None where it can."""
    workload = TrainingWorkload(attention=attention, sequence_length=length)
    try:
        check_training(resolve_model(name), workload, Parallelism())
    except PlanError as error:
        assert error.field == "workload.attention", error
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "attention", "reason"),
    [
        ("falcon-7b", Attention.TRITON, "takes no attention function"),
        ("falcon-7b", Attention.SDPA, None),
        ("pythia-1.4b", Attention.TRITON, None),
        ("opt-6.7b", Attention.TRITON, None),
        ("qwen3-30b-a3b", Attention.TRITON, None),
        ("gemma-2-2b", Attention.SDPA, "does not cap"),
        ("gemma-3-1b", Attention.SDPA, None),
        ("gpt-oss-20b", Attention.EAGER, None),
        ("gpt-oss-20b", Attention.SDPA, "no attention sinks"),
        ("gpt-oss-20b", Attention.TRITON, "no step with attention sinks, which"),
        ("deepseek-v3", Attention.SDPA, None),
        (
            "deepseek-v2-lite",
            Attention.TRITON,
            "no step with keys of head size 192 and values of 128 has",
        ),
        ("mistral-7b-v0.1", Attention.TRITON, None),
    ],
)
def test_attentions_of_a_family(name: str, attention: Attention, reason: str | None) -> None:
    found = refusal(name, attention)
    assert found is None if reason is None else reason in (found or "")


def test_our_kernel_slides_windows_shorter_than_the_sequence() -> None:
    assert refusal("mistral-7b-v0.1", Attention.TRITON, 8192) is None
    assert refusal("gemma-3-1b", Attention.TRITON, 1024) is None


@pytest.mark.parametrize(("name", "rows"), [("opt-6.7b", 2048), ("gpt2", 1024)])
def test_learned_positions_bound_the_length(name: str, rows: int) -> None:
    spec = resolve_model(name)
    check_length(spec, "workload.sequence_length", rows)
    with pytest.raises(PlanError, match=f"at most {rows}"):
        check_length(spec, "workload.sequence_length", rows + 1)


def test_rotary_positions_do_not() -> None:
    check_length(resolve_model("pythia-1.4b"), "workload.sequence_length", 10**6)


@pytest.mark.parametrize(
    ("family", "has_sdpa"),
    [("gpt_oss", False), ("gemma2", False), ("falcon", True), ("deepseek_v3", True)],
)
def test_what_transformers_says_of_sdpa(family: str, has_sdpa: bool) -> None:
    model_class = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
    assert getattr(model_class, "_supports_sdpa", None) is has_sdpa
