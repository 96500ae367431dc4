"""What the planner says an engine holds against the engines themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.fsdp2 import Fsdp2States, row_shards
from planner.memory.groups import Place, group_numels
from planner.memory.states import PeakmarkStates
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.workload import Optimizer, Precision
from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

CONFIG = {
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


def spec_of(tied: bool) -> ModelSpec:
    return spec_from_config({**CONFIG, "tie_word_embeddings": tied}, name="tiny")


def run_step(spec: ModelSpec, precision: Precision, stage: int, ranks: int) -> dict[str, int]:
    """State bytes of the real engine on rank 0, just before its first optimizer step and after."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config)).train()
    engine = ZeroEngine(
        model,
        stage=stage,
        optimizer="adamw_loop",
        precision=str(precision),
        lr=1e-3,
        device=torch.device("cpu"),
        collectives=LocalCollectives(rank=0, world_size=ranks),
    )
    tokens = torch.randint(spec.vocab_size, (1, 8))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss, last_micro_batch=True)
    before = engine.state_bytes()
    engine.step()
    return {**before, "optimizer_bytes": engine.state_bytes()["optimizer_bytes"]}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", [Precision.MIXED, Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_equal_the_real_engine_s(stage: int, precision: Precision, tied: bool) -> None:
    spec, ranks = spec_of(tied), 7  # 7 divides none of the groups
    real = run_step(spec, precision, stage, ranks)
    states = PeakmarkStates(spec, precision, Optimizer.ADAMW_LOOP, stage, ranks, accumulates=False)
    held = states.persistent()
    groups = spec.num_layers + 2
    assert real["parameter_bytes"] == held["parameters"]
    assert real["optimizer_bytes"] == held["optimizer"] + groups * STEP_COUNTER_BYTES
    assert real["gradient_bytes"] == states.optimizer_step()["gradients"]


def test_fsdp2_rows_are_padded_parameter_by_parameter() -> None:
    # 5 rows over 4 ranks: 2 rows each; 3 rows over 8 ranks: still 1 row each.
    assert row_shards([(5, 3)], 4) == 6
    assert row_shards([(3, 10)], 8) == 10
    assert row_shards([(5, 3), (3, 10)], 1) == 45


def test_fsdp2_keeps_16_bytes_per_parameter_over_the_ranks() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    states = Fsdp2States(spec, Precision.MIXED, Optimizer.ADAMW_FUSED, 3, 8, accumulates=False)
    held, step = states.persistent(), states.optimizer_step()
    # Every dimension of this model divides by 8: 4 + 8 + 4 bytes per parameter.
    assert held["parameters"] + held["optimizer"] + step["gradients"] == 2 * spec.parameters
    assert step["temporary"] == 0


@pytest.mark.parametrize(("stage", "kept"), [(3, 0), (2, 6)])
def test_fsdp2_copies_a_layer_out_beside_the_buffer_of_the_one_before(
    stage: int, kept: int
) -> None:
    """wait_for_unshard drops the buffer before once the copies exist: `kept` layers stay copied."""
    spec = resolve_model("meta-llama/Llama-3.1-8B")  # every dimension divides by 8
    root, layer = 2 * 128256 * 4096 + 4096, 218_112_000
    states = Fsdp2States(spec, Precision.BF16, Optimizer.ADAMW_FUSED, stage, 8, accumulates=False)

    def gathered_bytes(place: Place) -> float:
        return float(states.at(place)["gathered"] + states.at_section_end(place)["gathered"])

    # The root's copy and buffer, the first layer's copy and buffer.
    assert gathered_bytes(Place("embed")) == 2 * (2 * root + 2 * layer)
    # The buffers of layers 5 and 6 and the copy of layer 6.
    assert gathered_bytes(Place("layer", 5)) == 2 * (root + (3 + kept) * layer)
    assert states.at_section_end(Place("layer", 31)) == {"gathered": 0}


def test_a_group_is_what_transformers_puts_into_it() -> None:
    numels = group_numels(resolve_model("meta-llama/Llama-3.1-8B"))
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert (numels.embedding, numels.head) == (128256 * 4096, 128256 * 4096 + 4096)
    assert numels.layers.by_kind() == [("layer", 32, layer)]


def test_the_foreach_optimizer_of_one_group_makes_one_more_fp32_copy() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")

    def temporary(optimizer: Optimizer) -> int:
        states = PeakmarkStates(spec, Precision.MIXED, optimizer, 3, 8, accumulates=False)
        return int(states.optimizer_step()["temporary"])

    largest_shard = (128256 * 4096 + 4096) // 8
    assert temporary(Optimizer.ADAMW_FUSED) == 4 * largest_shard
    assert temporary(Optimizer.ADAMW_FOREACH) == 8 * largest_shard
    assert temporary(Optimizer.ADAMW_LOOP) == 12 * largest_shard
