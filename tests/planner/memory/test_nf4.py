"""4-bit weights below adapters: bytes by hand, against QLoRA's paper and bitsandbytes itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.memory.adapters import trained_groups
from planner.memory.ddp import DdpStates
from planner.memory.nf4 import nf4_bytes, nf4_tensors
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import (
    BaseDtype,
    Checkpointing,
    Engine,
    LoraTargets,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)
from runners.engines.ddp import DdpEngine
from runners.jobs.adapters import choose_trained
from runners.trace.variants import FOUR_BIT
from runners.zero.collectives import LocalCollectives
from runners.zero.groups import decoder_layers
from tests.runners.trace.test_saved_tensors import tiny_spec

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
DDP = Parallelism(engine=Engine.DDP, zero_stage=0, world_size=1)
QLORA = TrainingWorkload(
    lora_rank=16,
    base_dtype=BaseDtype.NF4,
    precision=Precision.BF16,
    checkpointing=Checkpointing.FULL,
    sequence_length=1024,
)
LINEARS = [4096 * 4096, 4096 * 1024, 4096 * 1024, 4096 * 4096, *[4096 * 14336] * 3]


def test_a_weight_of_4096_by_4096() -> None:
    blocks = 4096 * 4096 // 64
    assert nf4_tensors(4096 * 4096) == {
        "weight": 4096 * 4096 // 2,
        "code": 16 * 4,
        "offset": 4,
        "absmax": blocks,
        "nested absmax": blocks // 256 * 4,
        "nested code": 256 * 4,
    }


def test_scales_take_what_the_paper_says() -> None:
    # arXiv 2305.14314, section 3: 0.5 bits of scales per parameter become 0.127, 0.373 fewer: about
    # 3 GB of a model of 65 billion.
    numel = 65 * 10**9
    scale_bits = 8 * (nf4_bytes(numel) - numel // 2) / numel
    assert scale_bits == pytest.approx(0.127, abs=5e-4)
    assert numel * (0.5 - scale_bits) / 8 / 1e9 == pytest.approx(3.0, abs=0.05)


def test_an_8b_model_by_hand() -> None:
    memory = training_memory(LLAMA, QLORA, DDP).to_dict()
    parts = {part["name"]: part["bytes"] for part in memory["components"]}
    rows = {row["name"]: row for row in memory["ledger"]}
    # Half a byte, 1/64 and 4/(64 * 256) bytes per weight; code books and offset of every matrix.
    layer = sum(n // 2 + n // 64 + n // 16384 * 4 for n in LINEARS) + 7 * (64 + 1024 + 4)
    # q, k, v, o, gate, up and down: rank times inputs and outputs.
    adapters = 16 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    rest = 2 * 128256 * 4096 + 65 * 4096
    assert parts["parameters"] == 32 * layer + 2 * (32 * adapters + rest)
    assert rows["frozen layer 4-bit parameters"]["bytes"] == 32 * layer
    assert parts["optimizer"] == 4 * 32 * adapters
    assert sum(row["bytes"] for row in memory["ledger"]) == memory["allocated_bytes"]


def test_a_product_takes_its_weight_in_16_bits_for_its_length() -> None:
    """Of the largest matrix, in the backward of a layer: 2 bytes a weight beside 16-bit LoRA."""
    whole = TrainingWorkload(
        lora_rank=16,
        precision=Precision.BF16,
        checkpointing=Checkpointing.FULL,
        sequence_length=1024,
    )
    four, sixteen = (training_memory(LLAMA, w, DDP, segment_share=0.1) for w in (QLORA, whole))
    saved = 2 * 32 * sum(LINEARS) - 32 * sum(nf4_bytes(n) for n in LINEARS)
    lowered = sixteen.allocated_bytes - four.allocated_bytes
    assert saved - 2 * 4096 * 14336 <= lowered <= saved


def test_formulas_and_replay_see_the_same_peak() -> None:
    replayed = training_memory(LLAMA, QLORA, DDP).allocated_bytes
    summed = training_memory(LLAMA, QLORA, DDP, segment_share=0.1).allocated_bytes
    assert replayed == pytest.approx(summed, rel=0.01)


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_states_equal_what_bitsandbytes_holds(fake_group: None) -> None:
    pytest.importorskip("bitsandbytes")
    config = {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    spec = spec_from_config(config, name="tiny")
    workload = TrainingWorkload(lora_rank=4, lora_targets=LoraTargets.QV, base_dtype=BaseDtype.NF4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config))
        choose_trained(model, workload)
    engine = DdpEngine(
        model.train(),
        stage=0,
        optimizer="adamw_loop",
        precision="bf16",
        lr=1e-3,
        device=torch.device("cpu"),
        collectives=LocalCollectives(rank=0, world_size=2),
    )
    tokens = torch.randint(101, (1, 8))
    loss = engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss, last_micro_batch=True)
    plan = (spec, Precision.BF16, Optimizer.ADAMW_LOOP, 0, 2)
    states = DdpStates(*plan, accumulates=False, trained=trained_groups(spec, workload))
    assert engine.state_bytes()["parameter_bytes"] == states.persistent()["parameters"]


def _refusal(parallelism: Parallelism = DDP, **chosen: object) -> str:
    workload = TrainingWorkload(
        **{"base_dtype": BaseDtype.NF4, "precision": Precision.BF16, "lora_rank": 8} | chosen
    )
    with pytest.raises(PlanError) as caught:
        check_training(LLAMA, workload, parallelism)
    return str(caught.value)


def test_what_cannot_be_held_in_4_bits_is_said() -> None:
    assert "whole on every rank; use as_precision, or set workload.lora_rank." in _refusal(
        lora_rank=0
    )
    for engine in (Engine.FSDP2, Engine.PEAKMARK):
        assert "or take engine ddp (ZeRO stage 0) or" in _refusal(Parallelism(engine=engine))
    # One sentence names all that lacks.
    both = _refusal(Parallelism(), lora_rank=0)
    assert "set workload.lora_rank and take engine ddp" in both
    assert "workload.precision is 'fp32'" in _refusal(precision=Precision.FP32)


@pytest.mark.parametrize("family", FOUR_BIT)
def test_the_weights_of_every_linear_layer_are_held_in_4_bits(family: str) -> None:
    spec = tiny_spec(family)
    workload = TrainingWorkload(lora_rank=4, base_dtype=BaseDtype.NF4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config))
    linear = [
        sorted(tuple(part.weight.shape) for part in layer.modules() if isinstance(part, nn.Linear))
        for layer in decoder_layers(model)
    ]
    trained = trained_groups(spec, workload)
    assert trained is not None
    assert [sorted(shapes) for shapes in trained.four_bit_shapes] == linear
