"""FLOPs against torch's own counter over real modules; bytes and pairs against hand counts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.families import SUPPORTED_FAMILIES
from planner.model import ModelSpec
from planner.operations import (
    attended_pairs,
    attention_costs,
    element_sizes,
    matmul,
    model_flops,
    muon_flops,
    optimizer_cost,
    projection_costs,
    training_costs,
)
from planner.presets import resolve_model
from planner.workload import Attention, Checkpointing, Optimizer, Precision, TrainingWorkload

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
}
FAMILIES = [family for family in SUPPORTED_FAMILIES if family != "gpt2"]
LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
EAGER = TrainingWorkload(attention=Attention.EAGER, precision=Precision.FP32)


def small_spec(family: str) -> ModelSpec:
    """Return a small model of a family."""
    config: dict[str, Any] = {"model_type": family, **SMALL, **OWN.get(family, {})}
    if family == "gpt2":
        config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return spec_from_config(config, name=family)


def counted_flops(spec: ModelSpec, b: int, s: int) -> tuple[int, int]:
    """Return forward and total FLOPs of a real eager training step on the CPU."""
    config = AutoConfig.for_model(**spec.hf_config)
    # Experts one after the other: the counter does not know the grouped product.
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(0, spec.vocab_size, (b, s))
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_flops_of_a_step_are_those_that_torch_counts(family: str) -> None:
    spec, b, s = small_spec(family), 2, 24
    costs = training_costs(spec, EAGER, float(b), float(s))
    ours = {
        kind: sum(cost.flops for cost in costs if cost.name.startswith(kind))
        for kind in ("forward", "backward")
    }
    forward, total = counted_flops(spec, b, s)
    # The counter also sees the rotary table, a product of a few frequencies with positions.
    assert ours["forward"] == pytest.approx(forward, rel=1e-3)
    assert ours["forward"] + ours["backward"] == pytest.approx(total, rel=1e-3)


def test_flops_of_a_mixture_follow_the_experts_a_token_visits() -> None:
    spec = resolve_model("mixtral-8x7b")
    costs = {
        cost.name: cost for cost in projection_costs(spec, element_sizes(Precision.BF16), 10.0)
    }
    assert costs["experts"].flops == 32 * 2.0 * 10 * 2 * 3 * 4096 * 14336
    assert costs["router"].flops == 32 * 2.0 * 10 * 4096 * 8
    # Ten tokens with two experts each can visit all eight: their weights are read once.
    weights_bytes = 32 * 8 * 3 * 4096 * 14336 * 2
    assert weights_bytes < costs["experts"].bytes < weights_bytes * 1.001


@pytest.mark.parametrize("window", [None, 1, 5, 9, 100])
def test_causal_pairs_are_those_of_a_mask(window: int | None) -> None:
    s = 9
    pairs = sum(
        1
        for query, key in itertools.product(range(s), repeat=2)
        if key <= query and (window is None or query - key < window)
    )
    assert attended_pairs(float(s), window) == pairs


def test_a_product_moves_each_operand_once() -> None:
    cost = matmul("x", 3.0, 5, 7, 2)
    assert (cost.flops, cost.bytes) == (2 * 3 * 5 * 7, 2 * (3 * 5 + 5 * 7 + 3 * 7))


def attention_flops(attention: Attention, s: float, spec: ModelSpec = LLAMA) -> float:
    """Return the forward FLOPs of attention over all layers for one row."""
    costs = attention_costs(spec, attention, element_sizes(Precision.BF16), 1.0, s)
    return float(sum(cost.flops for cost in costs))


def test_falcon_computes_the_square_under_sdpa_too() -> None:
    falcon = resolve_model("tiiuae/falcon-7b")
    for kernel in (Attention.EAGER, Attention.SDPA):
        assert attention_flops(kernel, 1024.0, falcon) == 32 * 4 * 4544 * 1024.0**2


def test_latent_attention_scores_and_sums_vectors_of_two_widths() -> None:
    spec = resolve_model("deepseek-ai/DeepSeek-V3")
    costs = attention_costs(spec, Attention.SDPA, element_sizes(Precision.BF16), 1.0, 1000.0)
    pairs = 61 * 1000 * 1001 / 2
    assert [cost.flops for cost in costs] == [2 * 128 * 192 * pairs, 2 * 128 * 128 * pairs]
    tokens = 61 * 1000
    assert costs[0].bytes == tokens * (2 * 2 * 128 * 192 + 4 * 128)
    assert costs[1].bytes == tokens * 2 * 2 * 128 * 128


def test_fused_kernels_skip_half_of_the_square_and_eager_does_not() -> None:
    eager = attention_flops(Attention.EAGER, 4096.0)
    assert eager == 32 * 4 * 4096 * 4096**2
    for kernel in (Attention.SDPA, Attention.TRITON):
        assert attention_flops(kernel, 4096.0) == eager / 2 * (4097 / 4096)


def test_our_kernel_computes_what_a_window_shows() -> None:
    # The first 4,096 tokens see 1 to 4,096 keys, the other 4,096 see 4,096 each.
    mistral = resolve_model("mistralai/Mistral-7B-v0.1")
    pairs = 4096 * 4097 / 2 + 4096 * 4096
    assert attention_flops(Attention.TRITON, 8192.0, mistral) == 32 * 4 * 4096 * pairs


def test_sdpa_computes_the_square_under_a_window() -> None:
    mistral = resolve_model("mistralai/Mistral-7B-v0.1")
    assert attention_flops(Attention.SDPA, 8192.0, mistral) == 32 * 4 * 4096 * 8192.0**2
    causal = 32 * 4 * 4096 * 4096 * 4097 / 2
    assert attention_flops(Attention.SDPA, 4096.0, mistral) == causal


def test_eager_attention_moves_bytes_with_the_square_and_fused_in_proportion() -> None:
    sizes = element_sizes(Precision.BF16)

    def moved(attention: Attention, s: float) -> float:
        return float(sum(c.bytes for c in attention_costs(LLAMA, attention, sizes, 1.0, s)))

    assert moved(Attention.SDPA, 65536.0) == 2 * moved(Attention.SDPA, 32768.0)
    assert moved(Attention.EAGER, 65536.0) > 3.9 * moved(Attention.EAGER, 32768.0)


def test_checkpointing_runs_the_layers_once_more() -> None:
    plain = training_costs(LLAMA, TrainingWorkload(), 1.0, 4096.0)
    full = training_costs(LLAMA, TrainingWorkload(checkpointing=Checkpointing.FULL), 1.0, 4096.0)
    again = [cost for cost in full if cost.name.startswith("recompute")]
    assert [cost for cost in full if cost not in again] == plain
    forward = {cost.name: cost.flops for cost in plain}
    for cost in again:
        assert cost.flops == forward[cost.name.replace("recompute", "forward")]
    assert "recompute.head" not in {cost.name for cost in again}


@pytest.mark.parametrize(
    ("optimizer", "precision", "bytes_per_element"),
    [
        # Gradient 2 + 4, then gradient, parameter, two states read and three written in fp32, then
        # the copy 4 + 2.
        (Optimizer.ADAMW_FUSED, Precision.MIXED, 7 * 4 + 12),
        (Optimizer.ADAMW_FUSED, Precision.BF16, 7 * 2),
        (Optimizer.ADAMW_FOREACH, Precision.FP32, 20 * 4),
        (Optimizer.SGD, Precision.AUTOCAST, 8 * 4),
        (Optimizer.ADAMW_8BIT, Precision.FP32, 4 * 4),
        *(
            (Optimizer.ADAFACTOR, p, 17 * size)
            for p, size in ((Precision.FP32, 4), (Precision.BF16, 2))
        ),
    ],
)
def test_the_update_moves_its_states(
    optimizer: Optimizer, precision: Precision, bytes_per_element: int
) -> None:
    workload = TrainingWorkload(optimizer=optimizer, precision=precision)
    cost = optimizer_cost(workload, element_sizes(precision), 1000.0)
    assert cost.bytes == 1000 * bytes_per_element


def test_every_optimizer_has_a_cost() -> None:
    for optimizer in Optimizer:
        workload = TrainingWorkload(optimizer=optimizer)
        assert optimizer_cost(workload, element_sizes(Precision.MIXED), 1.0).bytes > 0


def test_muon_multiplies_every_matrix_of_the_layers_five_times() -> None:
    square = 4 * 4096**3 + 2 * 4096**3  # q and o
    narrow = 4 * 1024**2 * 4096 + 2 * 1024**3  # k and v
    wide = 4 * 4096**2 * 14_336 + 2 * 4096**3  # gate, up and down
    assert muon_flops(LLAMA) == 32 * 5 * (2 * square + 2 * narrow + 3 * wide)


def test_useful_flops_are_six_per_parameter_and_token_plus_attention() -> None:
    tokens = 4096
    in_products = LLAMA.parameters - 128256 * 4096 - 65 * 4096
    attention = 3 * 4 * 4096 * 32 * tokens * (tokens + 1) / 2
    assert model_flops(LLAMA, 1.0, float(tokens)) == 6 * in_products * tokens + attention


def test_formulas_give_arrays_what_they_give_numbers() -> None:
    b, s = np.array([[1.0], [4.0]]), np.array([128.0, 4096.0, 9000.0])
    for spec in (LLAMA, resolve_model("mixtral-8x7b"), resolve_model("mistralai/Mistral-7B-v0.1")):
        workload = replace(EAGER, attention=Attention.SDPA, checkpointing=Checkpointing.FULL)
        together = training_costs(spec, workload, b, s)
        for i, j in itertools.product(range(2), range(3)):
            alone = training_costs(spec, workload, float(b[i, 0]), float(s[j]))
            for many, one in zip(together, alone, strict=True):
                flops = np.broadcast_to(many.flops, (2, 3))[i, j]
                moved = np.broadcast_to(many.bytes, (2, 3))[i, j]
                assert (flops, moved) == (one.flops, one.bytes)
