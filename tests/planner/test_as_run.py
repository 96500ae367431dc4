"""Recorded plans are predicted for the transformers that ran them."""

from __future__ import annotations

from typing import Any

import pytest

from planner.as_run import as_run
from planner.memory.replay import Memory
from planner.memory.replay_base import EngineBase
from planner.plan import Plan, parse_plan
from planner.units import MIB_BYTES
from planner.workload import TrainingWorkload


def plan_of(model: str) -> Plan:
    return parse_plan(
        {
            "model": {"preset": model},
            "workload": {"sequence_length": 1024},
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
    assert memory.allocator.allocated_bytes == before_layers
    engine._take_workspace("layer")
    assert memory.allocator.allocated_bytes == 32 * MIB_BYTES
