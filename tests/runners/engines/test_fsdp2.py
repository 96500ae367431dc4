"""FSDP2's shards on the first and the last rank against the planner's, with a tied embedding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.fsdp2 import Fsdp2States
from planner.workload import Optimizer, Precision
from runners.engines.fsdp2 import Fsdp2Engine
from runners.zero.collectives import LocalCollectives

RANKS = 60  # more than some parameters have rows, and no divisor of the others'
CONFIG = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(params=[0, RANKS - 1])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield request.param
    dist.destroy_process_group()


def test_rank_0_holds_the_most_and_the_last_only_padding(rank: int) -> None:
    spec = spec_from_config(CONFIG, name="tiny")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config)).train()
    engine = Fsdp2Engine(
        model,
        stage=3,
        optimizer="sgd",
        precision="fp32",
        lr=1e-3,
        device=torch.device("cpu"),
        collectives=LocalCollectives(rank=rank, world_size=RANKS),
    )
    tokens = torch.randint(spec.vocab_size, (1, 8))
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss, last_micro_batch=True)
        held = engine.state_bytes()
        engine.step()
    states = Fsdp2States(spec, Precision.FP32, Optimizer.SGD, 3, RANKS, accumulates=False)
    predicted = states.persistent()
    # Storage is padded alike on every rank; what an optimizer keeps is not padded.
    assert held["parameter_bytes"] == predicted["parameters"]
    if rank == 0:
        assert held["optimizer_bytes"] == predicted["optimizer"]
        return
    # ceil(101 / 60) = 2 rows, of which rank 59 has none, nor of the others' 1 or 2.
    assert held["optimizer_bytes"] == 0
