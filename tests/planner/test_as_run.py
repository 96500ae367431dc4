"""Recorded plans are predicted for the transformers that ran them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.as_run import as_run
from planner.memory.groups import Place
from planner.memory.replay import Memory
from planner.memory.replay_base import EngineBase
from planner.memory.sections import allocations
from planner.memory.templates import OLDER, Traced, load_steps, template_versions, traced
from planner.plan import Plan, parse_plan
from planner.units import MIB_BYTES
from planner.workload import Precision, TrainingWorkload


def plan_of(model: str, attention: str = "sdpa") -> Plan:
    return parse_plan(
        {
            "model": {"preset": model},
            "workload": {"sequence_length": 1024, "attention": attention},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )


@pytest.mark.parametrize(
    ("versions", "multiplies"),
    [
        ({"transformers": "5.17.0"}, True),
        ({"transformers": "5.18.0"}, True),
        ({"transformers": "5.19.0"}, False),
        ({"transformers": "5.24.0.dev0"}, False),
        ({"transformers": "6.0"}, False),
        ({"transformers": "unknown"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_angles_came_from_a_product_until_5_18(versions: Any, multiplies: bool) -> None:
    plan = plan_of("Qwen/Qwen3-0.6B")
    found = as_run(plan, {"versions": versions})
    assert found.model.multiplies_for_angles is multiplies
    assert found.workload == plan.workload


def test_learned_positions_have_no_angles() -> None:
    plan = plan_of("openai-community/gpt2-large")
    assert as_run(plan, {"versions": {"transformers": "5.17.0"}}) is plan


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0"])
def test_the_first_product_takes_the_forward_workspace(version: str) -> None:
    plan = as_run(plan_of("Qwen/Qwen3-0.6B"), {"versions": {"transformers": version}})
    assert isinstance(plan.workload, TrainingWorkload)
    memory = Memory()
    engine = EngineBase(plan.model, plan.workload, memory, 64 * MIB_BYTES)
    engine.after_embedding()
    before_layers = 32 * MIB_BYTES if version == "5.17.0" else 0
    assert memory.allocator.serve().allocated_bytes == before_layers
    engine._take_workspace("layer")
    assert memory.allocator.serve().allocated_bytes == 32 * MIB_BYTES


@pytest.mark.parametrize(
    ("version", "masks"), [("5.17.0", True), ("5.18.0", False), ("6.1", False)]
)
def test_experts_masked_their_rows_until_5_17(version: str, masks: bool) -> None:
    found = as_run(plan_of("mistralai/Mixtral-8x7B-v0.1"), {"versions": {"transformers": version}})
    assert found.model.masks_experts is masks
    assert not as_run(
        plan_of("Qwen/Qwen3-0.6B"), {"versions": {"transformers": version}}
    ).model.masks_experts


def test_older_experts_copy_their_rows_behind_each_of_two_products() -> None:
    """`masked_fill` makes a tensor; rows of gate and up in one, then of the hidden size, in bf16."""

    def copies(family: str) -> tuple[int, int]:
        steps = load_steps(Traced(family, "sdpa/bf16/none", ("moe", "moe")), "kept")
        names = steps.steps.monomials
        rows = [(names[row[1]], row[2]) for row in allocations(steps.rows(Place("layer", 0)))]
        return (
            rows.count(("batch*seq*ffn*top_k", 4)),
            rows.count(("batch*seq*top_k*hidden", 2)),
        )

    gate_and_up, hidden = copies("mixtral")
    assert copies(OLDER + "mixtral") == (gate_and_up + 1, hidden + 1)
    assert template_versions(OLDER + "mixtral")["transformers"] == "5.17.0"


def test_what_was_not_traced_with_the_older_is_predicted_as_the_newest_runs_it() -> None:
    plan = as_run(plan_of("mistralai/Mixtral-8x7B-v0.1"), {"versions": {"transformers": "5.17.0"}})
    assert isinstance(plan.workload, TrainingWorkload)
    stored = traced(plan.model, plan.workload, 1024)
    assert stored.family == OLDER + "mixtral"
    fp32 = traced(plan.model, replace(plan.workload, precision=Precision.FP32), 1024)
    assert fp32.family == "mixtral"


@pytest.mark.parametrize(
    ("noted", "portable"),
    [
        ({}, ("forward", "backward")),
        ({"attention_kernels": None}, ("forward", "backward")),
        ({"attention_kernels": {"forward": ["hopper"], "backward": ["triton"]}}, ("backward",)),
        ({"attention_kernels": {"forward": ["hopper"], "backward": ["hopper"]}}, ()),
        # Some layers have a window; out of memory before the first backward.
        ({"attention_kernels": {"forward": ["hopper", "triton"], "backward": []}}, ()),
    ],
)
def test_rows_tell_which_attention_kernels_ran(
    noted: dict[str, Any], portable: tuple[str, ...]
) -> None:
    environment = {"versions": {"transformers": "5.24.0"}, **noted}
    found = as_run(plan_of("Qwen/Qwen3-0.6B", "triton"), environment)
    assert found.model.portable_attention == portable
    assert as_run(plan_of("Qwen/Qwen3-0.6B"), environment).model.portable_attention == ()
