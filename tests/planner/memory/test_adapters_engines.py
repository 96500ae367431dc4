"""Adapters of every family and under every engine, against peft, torch's engines and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.adapters import trained_groups
from planner.memory.ddp import DdpStates
from planner.memory.fsdp2 import Fsdp2States
from planner.memory.groups import Place
from planner.memory.training import training_memory
from planner.presets import resolve_model
from planner.workload import (
    Checkpointing,
    Engine,
    LoraTargets,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)
from runners.engines.ddp import DdpEngine
from runners.engines.fsdp2 import Fsdp2Engine
from runners.engines.zero_redundancy import ZeroRedundancyEngine
from runners.jobs.adapters import choose_trained
from runners.zero.collectives import LocalCollectives
from runners.zero.groups import decoder_layers

RANKS = 4
TINY = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "moe_intermediate_size": 14,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 10},
    "phi3": {},
    "olmo2": {},
    "gemma2": {"head_dim": 10},
    "gemma3_text": {"head_dim": 10},
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 64, "n_inner": 77},
    "gpt_neox": {},
    "opt": {"ffn_dim": 77, "word_embed_proj_dim": 48},
    "falcon": {"ffn_hidden_size": 77, "multi_query": True, "parallel_attn": True},
    "mixtral": EXPERTS,
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {**EXPERTS, "head_dim": 8},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None},
    "deepseek_v3": LATENT,
}


def _adapted(config: dict[str, Any], workload: TrainingWorkload) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        choose_trained(model, workload)
    return model


@pytest.mark.parametrize("targets", LoraTargets)
@pytest.mark.parametrize("family", OWN)
def test_a_layer_holds_what_peft_gives_it_in_its_order(family: str, targets: LoraTargets) -> None:
    spec = spec_from_config({**TINY, "model_type": family, **OWN[family]}, name="tiny")
    workload = TrainingWorkload(lora_rank=5, lora_targets=targets)
    layers = decoder_layers(_adapted(spec.hf_config, workload))
    trained = trained_groups(spec, workload)
    assert trained is not None
    for index, layer in enumerate(layers):
        real = list(layer.parameters())
        assert trained.shapes["layers"][index] == tuple(tuple(p.shape) for p in real)
        learns = tuple(tuple(p.shape) for p in real if p.requires_grad)
        assert trained.trained_shapes["layers"][index] == learns
        assert trained.frozen.layers[index] == sum(p.numel() for p in real if not p.requires_grad)


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def _after_a_step(
    engine: Any, model: nn.Module, stage: int, precision: str
) -> tuple[dict[str, int], dict[str, int]]:
    """State bytes before and after an optimizer step."""
    real = engine(
        model.train(),
        stage=stage,
        optimizer="adamw_loop",
        precision=precision,
        lr=1e-3,
        device=torch.device("cpu"),
        collectives=LocalCollectives(rank=0, world_size=RANKS),
    )
    tokens = torch.randint(101, (1, 8))
    loss = real.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    real.backward(loss, last_micro_batch=True)
    before = real.state_bytes()
    real.step()
    return before, real.state_bytes()


CHOSEN = [{"lora_rank": 5, "lora_targets": LoraTargets.QV}, {"frozen_layers": 1}]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp2_s_states_equal_the_real_engine_s(
    stage: int, chosen: dict[str, Any], tied: bool, fake_group: None
) -> None:
    config = {**TINY, "model_type": "llama", "tie_word_embeddings": tied}
    spec, workload = spec_from_config(config, name="tiny"), TrainingWorkload(**chosen)
    model = _adapted(spec.hf_config, workload)
    before, after = _after_a_step(Fsdp2Engine, model, stage, "mixed")
    trained = trained_groups(spec, workload)
    plan = (spec, Precision.MIXED, Optimizer.ADAMW_LOOP, stage, RANKS)
    states = Fsdp2States(*plan, accumulates=False, trained=trained)
    counters = 4 * sum(parameter.requires_grad for parameter in model.parameters())
    assert before["parameter_bytes"] == states.persistent()["parameters"]
    assert before["gradient_bytes"] == states.optimizer_step()["gradients"]
    assert after["optimizer_bytes"] == states.persistent()["optimizer"] + counters


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(("engine", "stage"), [(DdpEngine, 0), (ZeroRedundancyEngine, 1)])
def test_ddp_s_states_equal_the_real_engine_s(
    engine: type[DdpEngine], stage: int, chosen: dict[str, Any], fake_group: None
) -> None:
    spec, workload = spec_from_config({**TINY, "model_type": "llama"}, name="t"), None
    workload = TrainingWorkload(**chosen)
    model = _adapted(spec.hf_config, workload)
    before, after = _after_a_step(engine, model, stage, "bf16")
    trained = trained_groups(spec, workload)
    plan = (spec, Precision.BF16, Optimizer.ADAMW_LOOP, stage, RANKS)
    states = DdpStates(*plan, accumulates=False, trained=trained)
    assert before["parameter_bytes"] == states.persistent()["parameters"]
    assert before["gradient_bytes"] == states.at(Place("embed"))["gradients"]
    assert trained is not None
    assert states.at(Place("embed"))["gradients"] == 2 * trained.trained.total()
    counters = after["optimizer_bytes"] - states.persistent()["optimizer"]
    assert 0 < counters <= 4 * sum(p.requires_grad for p in model.parameters())


ENGINES = [(Engine.FSDP2, 2), (Engine.FSDP2, 3), (Engine.DDP, 0), (Engine.ZERO_REDUNDANCY, 1)]


@pytest.mark.parametrize("chosen", [{"lora_rank": 16}, {"frozen_layers": 2}])
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_formulas_and_replay_see_the_same_peak(
    engine: Engine, stage: int, chosen: dict[str, Any]
) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 5})
    for ranks, checkpointing in ((1, Checkpointing.FULL), (8, Checkpointing.NONE)):
        workload = TrainingWorkload(
            sequence_length=900,
            precision=Precision.BF16,
            checkpointing=checkpointing,
            **chosen,
        )
        spread = Parallelism(engine=engine, zero_stage=stage, world_size=ranks)
        memory = training_memory(spec, workload, spread)
        summed = training_memory(spec, workload, spread, segment_share=0.1).allocated_bytes
        assert memory.allocated_bytes == pytest.approx(summed, rel=0.01)
        assert sum(row["bytes"] for row in memory.to_dict()["ledger"]) == memory.allocated_bytes


def test_fsdp2_gathers_frozen_weights_and_reduces_adapters_by_hand() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    workload = TrainingWorkload(lora_rank=16, lora_targets=LoraTargets.QV)
    trained = trained_groups(spec, workload)
    plan = (spec, Precision.BF16, Optimizer.ADAMW_FUSED, 3, 8)
    states = Fsdp2States(*plan, accumulates=False, trained=trained)
    adapters = 16 * (4096 + 4096 + 4096 + 1024)
    layer = (spec.parameters - 2 * 128256 * 4096 - 4096) // 32 + adapters
    root = 2 * 128256 * 4096 + 4096
    # The root, the running layer's copy, and the buffer of the layer that is gathered ahead.
    assert states.at(Place("layer_backward", 3))["gathered"] == 2 * (root + 2 * layer)
    assert states.at(Place("layer_backward", 3))["gradients"] == 2 * 28 * adapters // 8
    assert states.persistent()["optimizer"] == 4 * 32 * adapters // 8
    # Nothing tells FSDP2 that the first layer is done but the end of the backward.
    end = states.at(Place("embed_backward"))
    assert end["gathered"] == 2 * (root + layer)
    assert end["gradients"] == 2 * 31 * adapters // 8 + 2 * adapters
