"""FLOPs against torch's own counter over real modules; weights and pairs against hand counts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.families import SUPPORTED_FAMILIES
from planner.hardware import resolve_gpu
from planner.model import ModelSpec
from planner.operations import (
    attended_pairs,
    model_flops,
    multiplied_weights,
    muon_flops,
    update_bytes,
)
from planner.presets import resolve_model
from planner.speed.calibrated import rates_of
from planner.speed.step import micro_batch
from planner.workload import Attention, Optimizer, Parallelism, Precision, TrainingWorkload

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
RATES = rates_of(resolve_gpu("h200"))


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
    parts = micro_batch(spec, EAGER, Parallelism(world_size=1), RATES, b, s)
    ours = {
        phase: sum(float(part.flops) for part in parts if part.phase == phase)
        for phase in ("forward", "backward")
    }
    forward, total = counted_flops(spec, b, s)
    # The counter also sees the rotary table, a product of a few frequencies with positions.
    assert ours["forward"] == pytest.approx(forward, rel=1e-3)
    assert ours["forward"] + ours["backward"] == pytest.approx(total, rel=1e-3)


def test_a_mixture_multiplies_the_weights_of_the_experts_a_token_visits() -> None:
    spec = resolve_model("mixtral-8x7b")
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    experts = 4096 * 8 + 2 * 3 * 4096 * 14336
    assert multiplied_weights(spec) == 32 * (attention + experts) + 4096 * 32000


def test_latent_attention_multiplies_five_matrices() -> None:
    spec = resolve_model("deepseek-ai/DeepSeek-V3")
    # Queries down and up, keys and values down (with the rotary part) and up, the output.
    queries = 7168 * 1536 + 1536 * 128 * 192
    keys = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    attention = queries + keys + 128 * 128 * 7168
    dense, experts = 3 * 7168 * 18432, 7168 * 256 + (8 + 1) * 3 * 7168 * 2048
    weights = 61 * attention + 3 * dense + 58 * experts + 7168 * 129280
    assert multiplied_weights(spec) == weights


@pytest.mark.parametrize("window", [None, 1, 5, 9, 100])
def test_causal_pairs_are_those_of_a_mask(window: int | None) -> None:
    s = 9
    pairs = sum(
        1
        for query, key in itertools.product(range(s), repeat=2)
        if key <= query and (window is None or query - key < window)
    )
    assert attended_pairs(float(s), window) == pairs


@pytest.mark.parametrize(
    ("optimizer", "precision", "bytes_per_element"),
    [
        # Gradient, parameter and two states are read, all but the gradient written.
        (Optimizer.ADAMW_FUSED, Precision.MIXED, 7 * 4),
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
    assert update_bytes(optimizer, precision) == bytes_per_element


def test_every_optimizer_has_a_cost() -> None:
    assert all(update_bytes(optimizer, Precision.MIXED) > 0 for optimizer in Optimizer)


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
        together = model_flops(spec, b, s)
        for i, j in itertools.product(range(2), range(3)):
            assert together[i, j] == model_flops(spec, float(b[i, 0]), float(s[j]))
