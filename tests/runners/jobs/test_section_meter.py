"""A step cut into sections at its module boundaries, with a counter that is scripted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from planner.plan import parse_plan
from runners.contract import World
from runners.jobs.section_meter import MAX_SECTIONS, SectionMeter
from runners.jobs.train_step import Trainer, build_model
from runners.worlds import Launch, open_world

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
FORWARD = ["embed", "layer 0", "layer 1", "layer 2", "head", "loss"]
BACKWARD = [
    "loss backward",
    "layer 2 backward",
    "layer 1 backward",
    "layer 0 backward",
    "embed backward",
]


class Counter:
    """Counts its readings: the n-th says that 100 n bytes are allocated, with a peak 7 above."""

    def __init__(self) -> None:
        self.readings = self.resets = 0

    def allocated_bytes(self) -> int:
        self.readings += 1
        return 100 * self.readings

    def peak_bytes(self) -> int:
        return 100 * self.readings + 7

    def reset_peak(self) -> None:
        self.resets += 1


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[Trainer, nn.Module]]:
    """A trainer of the three layers that has run its first step."""
    chosen: dict[str, Any] = {"engine": "peakmark", "zero_stage": 3, **request.param}
    parallel = ("engine", "zero_stage")
    plan = parse_plan(
        {
            "model": {"config": CONFIG, "name": "tiny"},
            "workload": {
                "sequence_length": 8,
                "precision": "fp32",
                **{key: value for key, value in chosen.items() if key not in parallel},
            },
            "parallelism": {"world_size": 2, **{key: chosen[key] for key in parallel}},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )
    model = build_model(plan)
    with open_world(
        World.SOLO, world_size=2, rank=0, launch=Launch(), device=torch.device("cpu")
    ) as world:
        trainer = Trainer(plan, model, world, seed=0)
        trainer.step()
        yield trainer, model


@pytest.mark.parametrize(
    "trained",
    [
        {},
        {"engine": "fsdp2"},
        {"engine": "fsdp2", "zero_stage": 2, "checkpointing": "full"},
        {"zero_stage": 1, "grad_accumulation": 2},
        {"checkpointing": "full", "attention": "eager"},
        {"engine": "ddp", "zero_stage": 0},
        {"loss": "chunked"},
    ],
    indirect=True,
    ids=lambda chosen: " ".join(map(str, chosen.values())) or "default",
)
def test_one_step_is_cut_at_the_models_boundaries(trained: tuple[Trainer, nn.Module]) -> None:
    trainer, model = trained
    before, counter = hooks(model), Counter()
    rows = trainer.timeline(counter)
    assert [label for label, _, _ in rows] == [*FORWARD, *BACKWARD, "optimizer"]
    first = counter.readings - len(rows)
    assert [row[1:] for row in rows] == [
        [100 * (first + n), 100 * (first + n) + 7] for n in range(1, len(rows) + 1)
    ]
    assert counter.resets >= len(rows)
    assert hooks(model) == before
    trainer.step()
    assert trainer.meter.on_phase is None and counter.readings == first + len(rows)


@pytest.mark.parametrize(
    "trained", [{"lora_rank": 4, "zero_stage": 0, "precision": "bf16"}], indirect=True
)
def test_what_is_frozen_at_the_start_has_no_backward(trained: tuple[Trainer, nn.Module]) -> None:
    rows = trained[0].timeline(Counter())
    assert [label for label, _, _ in rows] == [*FORWARD, *BACKWARD[:-1], "optimizer"]


def test_a_section_that_goes_on_is_one_and_their_number_is_bounded() -> None:
    meter = SectionMeter(Counter())
    for number in range(2 * MAX_SECTIONS):
        meter.enter(f"layer {number // 2}")
    assert len(meter.rows()) == MAX_SECTIONS
    assert SectionMeter(Counter()).rows() == []
