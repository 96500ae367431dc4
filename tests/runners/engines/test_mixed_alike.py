"""In `mixed`, FSDP2 and our engine train alike, bit by bit, where they begin with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import runners.engines.fsdp2
import runners.zero.groups
from planner.plan import parse_plan
from runners.contract import World
from runners.jobs.train_step import Trainer, build_model
from runners.worlds import Launch, open_world

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
STEPS = 6


def _losses(engine: str, stage: int) -> list[float | None] | None:
    plan = parse_plan(
        {
            "model": {"config": CONFIG, "name": "tiny"},
            "workload": {"sequence_length": 64, "precision": "mixed"},
            "parallelism": {"engine": engine, "zero_stage": stage, "world_size": 1},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )
    cpu = torch.device("cpu")
    with open_world(World.CPU, world_size=1, rank=0, launch=Launch(), device=cpu) as world:
        trainer = Trainer(plan, build_model(plan), world, seed=0)
        for _ in range(STEPS):
            trainer.step()
        return trainer.step_losses()


def _drawing_bf16() -> Callable[[Tensor, str, int], None]:
    """Draw in fp32 and round to bf16, whatever holds the values."""
    draw = runners.zero.groups.initialise_parameter

    def initialise(values: Tensor, name: str, seed: int) -> None:
        full = torch.empty(values.shape)
        draw(full, name, seed)
        values.copy_(full.bfloat16())

    return initialise


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp2_and_our_engine_train_alike_in_mixed_precision(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    initialise = _drawing_bf16()
    for module in (runners.zero.groups, runners.engines.fsdp2):
        monkeypatch.setattr(module, "initialise_parameter", initialise)
    ours = _losses("peakmark", stage)
    assert ours == _losses("fsdp2", stage)
    assert ours is not None and len(set(ours)) == STEPS
