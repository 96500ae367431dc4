"""Templates of models whose layers differ, against what the real modules save on a CPU in bf16."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.kinds import layer_kinds
from planner.memory.templates import load_saved, monomial_values, traced
from planner.model import ModelSpec
from planner.workload import Attention, Precision, TrainingWorkload

BATCH, SEQ = 2, 24
COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LATENT = COMMON | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "gemma3_text": COMMON | {"num_hidden_layers": 7, "sliding_window": 8},
    "gpt_oss": COMMON
    | {
        "num_hidden_layers": 5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "deepseek_v2": {key: v for key, v in LATENT.items() if key != "head_dim"}
    | {"q_lora_rank": None},
    "deepseek_v3": {key: v for key, v in LATENT.items() if key != "head_dim"}
    | {"q_lora_rank": 40, "n_group": 4, "topk_group": 2},
}
EAGER = TrainingWorkload(
    attention=Attention.EAGER, precision=Precision.BF16, sequence_length=SEQ, micro_batch=BATCH
)


class Kept:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def tiny_spec(family: str) -> ModelSpec:
    """Return a small model of the family with layers of every kind."""
    return spec_from_config({"model_type": family, **TINY[family]}, name=f"tiny {family}")


def predicted_saved_bytes(spec: ModelSpec) -> int:
    """Return the bytes that the template says the forward keeps."""
    saved = load_saved(traced(spec, EAGER, SEQ))
    values = monomial_values(spec, tuple(t.monomial for t in saved), BATCH, SEQ)
    pairs = zip(saved, values, strict=True)
    total = sum(float(value) * t.coefficient_bytes * len(t.places) for t, value in pairs)
    return round(total)


def really_saved_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the distinct storages that autograd keeps, less parameters and inputs."""
    config = AutoConfig.for_model(**spec.hf_config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    tokens = torch.randint(spec.vocab_size, (BATCH, SEQ))
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    given.add(tokens.untyped_storage().data_ptr())
    kept: WeakSet[Kept] = WeakSet()

    def keep(tensor: torch.Tensor) -> Kept:
        holder = Kept(tensor)
        kept.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    # Graphs that lead nowhere, such as the choice of expert groups, are gone by now.
    storages = [holder.tensor.untyped_storage() for holder in kept]
    assert loss.requires_grad
    sizes: dict[int, int] = {s.data_ptr(): s.nbytes() for s in storages}
    return sum(size for pointer, size in sizes.items() if pointer not in given)


@pytest.mark.parametrize("family", TINY)
def test_saved_bytes_equal_what_the_real_module_saves(family: str) -> None:
    spec = tiny_spec(family)
    predicted, real = predicted_saved_bytes(spec), really_saved_bytes(spec)
    # The trace also holds what is alive without being saved: positions, rotary tables, masks.
    masks = 2 * 2 * SEQ * SEQ
    alive_unsaved_bytes = 16 * SEQ * (spec.head_dim + BATCH * 4) + masks + 64
    assert real <= predicted <= real + alive_unsaved_bytes


def test_kinds_of_layers_follow_the_model() -> None:
    kinds = {family: layer_kinds(tiny_spec(family), EAGER) for family in TINY}
    assert kinds["gemma3_text"] == ("sliding",) * 5 + ("plain", "sliding")
    assert kinds["gpt_oss"] == ("sliding+moe", "moe") * 2 + ("sliding+moe",)
    assert kinds["deepseek_v2"] == kinds["deepseek_v3"] == ("plain",) * 2 + ("moe",) * 2
