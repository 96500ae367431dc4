"""Training a part of a model: bytes by hand and against the real engine."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.memory.adapters import trained_groups
from planner.memory.groups import Place
from planner.memory.states import PeakmarkStates
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import (
    Checkpointing,
    Engine,
    LoraTargets,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)
from runners.jobs.adapters import choose_trained
from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
# Inputs and outputs of q, k, v, o, gate, up and down.
WIDTHS = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
WIDTHS += [(4096, 14336), (4096, 14336), (14336, 4096)]
TINY = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
STEP_COUNTER_BYTES = 4


@pytest.mark.parametrize(
    ("targets", "layers"),
    [(LoraTargets.QV, [WIDTHS[0], WIDTHS[2]]), (LoraTargets.ALL_LINEAR, WIDTHS)],
)
def test_adapters_of_an_8b_model_by_hand(
    targets: LoraTargets, layers: list[tuple[int, int]]
) -> None:
    workload = TrainingWorkload(lora_rank=16, lora_targets=targets)
    adapters = 32 * 16 * sum(inputs + outputs for inputs, outputs in layers)
    memory = training_memory(LLAMA, workload, Parallelism(zero_stage=0, world_size=1)).to_dict()
    parts = {part["name"]: part["bytes"] for part in memory["components"]}
    assert parts["parameters"] == 2 * (LLAMA.parameters + adapters)
    assert parts["optimizer"] == 12 * adapters
    named = {row["name"]: row["bytes"] for row in memory["ledger"]}
    assert named["layer parameters"] == 2 * adapters
    assert named["frozen embedding parameters"] == 2 * 128256 * 4096


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "chosen", [{"lora_rank": 5, "lora_targets": LoraTargets.QV}, {"frozen_layers": 1}]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_equal_the_real_engine_s(stage: int, chosen: dict, tied: bool) -> None:
    spec, ranks = spec_from_config({**TINY, "tie_word_embeddings": tied}, name="tiny"), 7
    workload = TrainingWorkload(**chosen)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config)).train()
    choose_trained(model, workload)
    engine = ZeroEngine(
        model,
        stage=stage,
        optimizer="adamw_loop",
        precision="mixed",
        lr=1e-3,
        device=torch.device("cpu"),
        collectives=LocalCollectives(rank=0, world_size=ranks),
    )
    tokens = torch.randint(spec.vocab_size, (1, 8))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss, last_micro_batch=True)
    real = engine.state_bytes()
    engine.step()
    plan = (spec, Precision.MIXED, Optimizer.ADAMW_LOOP, stage, ranks)
    states = PeakmarkStates(*plan, accumulates=False, trained=trained_groups(spec, workload))
    held = states.persistent()
    steps = len(engine.trained) * STEP_COUNTER_BYTES
    assert real["parameter_bytes"] == held["parameters"]
    assert real["gradient_bytes"] == states.optimizer_step()["gradients"]
    assert engine.state_bytes()["optimizer_bytes"] == held["optimizer"] + steps


def test_frozen_groups_are_gathered_as_long_as_they_are_used() -> None:
    workload = TrainingWorkload(lora_rank=16, lora_targets=LoraTargets.QV)
    plan = (LLAMA, Precision.MIXED, Optimizer.ADAMW_FUSED, 3, 8)
    states = PeakmarkStates(*plan, accumulates=False, trained=trained_groups(LLAMA, workload))
    embedding, head = 128256 * 4096, 128256 * 4096 + 4096
    layer = (LLAMA.parameters - embedding - head) // 32
    adapters = 16 * (2 * 4096 + 4096 + 1024)

    def gathered(place: Place) -> int:
        return int(states.at(place)["gathered"])

    assert gathered(Place("embed")) == 2 * (embedding + layer + adapters)
    assert gathered(Place("layer", 3)) == 2 * 2 * (layer + adapters)
    assert gathered(Place("loss_backward")) == 2 * head
    assert gathered(Place("layer_backward", 3)) == 2 * 2 * (layer + adapters)
    assert gathered(Place("layer_backward", 0)) == 2 * (layer + adapters)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
@pytest.mark.parametrize("targets", LoraTargets)
def test_formulas_and_replay_see_the_same_peak(
    targets: LoraTargets, checkpointing: Checkpointing, stage: int
) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 5})
    workload = TrainingWorkload(
        lora_rank=16, lora_targets=targets, checkpointing=checkpointing, sequence_length=900
    )
    ranks = Parallelism(zero_stage=stage, world_size=4)
    replayed = training_memory(spec, workload, ranks).allocated_bytes
    summed = training_memory(spec, workload, ranks, segment_share=0.1).allocated_bytes
    assert replayed == pytest.approx(summed, rel=0.03)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_layers_hold_parameters_only(stage: int) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 8})
    workload = TrainingWorkload(frozen_layers=3, checkpointing=Checkpointing.FULL)
    ranks = Parallelism(zero_stage=stage, world_size=8)
    memory = training_memory(spec, workload, ranks)
    summed = training_memory(spec, workload, ranks, segment_share=0.1).allocated_bytes
    assert memory.allocated_bytes == pytest.approx(summed, rel=0.03)
    layer = sum(inputs * outputs for inputs, outputs in WIDTHS) + 2 * 4096
    trained = 5 * layer + 128256 * 4096 + 4096
    # At stage 3 the fp32 master is the parameter.
    kept = 2 * spec.parameters if stage == 0 else (2 * spec.parameters + 2 * trained) // 8
    assert memory.peak.parts["optimizer"] == (12 * trained if stage == 0 else 8 * trained // 8)
    assert memory.peak.parts["parameters"] == kept


def _refusal(parallelism: Parallelism | None = None, **chosen: object) -> str:
    with pytest.raises(PlanError) as caught:
        check_training(LLAMA, TrainingWorkload(**chosen), parallelism or Parallelism())
    return str(caught.value)


def test_what_is_not_predicted_is_said() -> None:
    deepspeed = Parallelism(engine=Engine.DEEPSPEED)
    assert "not predicted for deepspeed" in _refusal(deepspeed, lora_rank=8)
    assert "workload.frozen_layers 0 instead of 2" in _refusal(lora_rank=8, frozen_layers=2)
    assert "0 to 31" in _refusal(frozen_layers=32)
    whole = Parallelism(zero_stage=0)
    assert "whole models only" in _refusal(whole, lora_rank=8, optimizer=Optimizer.MUON)
    with pytest.raises(
        PlanError, match=r"lora_rank is 8: a training step of gpt2 .* has not been traced; use 0"
    ):
        gpt2 = resolve_model("openai-community/gpt2")
        chosen = {"precision": Precision.AUTOCAST, "loss": Loss.CHUNKED}
        workload = TrainingWorkload(lora_rank=8, sequence_length=512, **chosen)
        check_training(gpt2, workload, Parallelism())
