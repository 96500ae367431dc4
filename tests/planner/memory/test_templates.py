"""The traced templates against hand counts and against what real modules save on a CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.memory.groups import Place
from planner.memory.kinds import CHECKPOINTED, FROZEN, PLAIN, SLIDING
from planner.memory.sections import COMPONENTS, allocations
from planner.memory.templates import (
    Floats,
    Moments,
    Traced,
    load_moments,
    load_saved,
    load_steps,
    monomial_values,
    traced,
)
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.workload import Attention, Precision, TrainingWorkload

BATCH, SEQ, LAYERS = 2, 24, 3
FP32_EAGER = TrainingWorkload(
    micro_batch=BATCH, precision=Precision.FP32, attention=Attention.EAGER
)
COMMON = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
UNGROUPED = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
TINY = {
    "llama": COMMON,
    "mistral": COMMON | {"sliding_window": None},
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "phi3": COMMON,
    "olmo2": COMMON,
    "gemma2": COMMON | {"head_dim": 16, "sliding_window": 64},
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": UNGROUPED | {"rotary_pct": 0.5},
    "opt": UNGROUPED,
    "falcon": UNGROUPED,
    "qwen3_moe": COMMON
    | {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gpt2": {
        "vocab_size": 101,
        "n_embd": 48,
        "n_head": 6,
        "n_inner": 80,
        "n_layer": LAYERS,
        "n_positions": 64,
        "tie_word_embeddings": False,
    },
}


def tiny_spec(family: str) -> ModelSpec:
    return spec_from_config({"model_type": family, **TINY[family]}, name=f"tiny {family}")


def predicted_saved_bytes(spec: ModelSpec) -> int:
    saved = load_saved(traced(spec, FP32_EAGER, SEQ))
    values = monomial_values(spec, tuple(t.monomial for t in saved), BATCH, SEQ)
    return round(
        sum(
            value * tensor.coefficient_bytes * len(tensor.places)
            for tensor, value in zip(saved, values, strict=True)
        )
    )


def really_saved_bytes(spec: ModelSpec) -> int:
    """Bytes of the distinct storages that autograd keeps, less parameters and inputs."""
    config = AutoConfig.for_model(**spec.hf_config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    tokens = torch.randint(spec.vocab_size, (BATCH, SEQ))
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    given.add(tokens.untyped_storage().data_ptr())
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", TINY)
def test_saved_bytes_equal_what_the_real_module_saves(family: str) -> None:
    spec = tiny_spec(family)
    predicted = predicted_saved_bytes(spec)
    real = really_saved_bytes(spec)
    # The trace also holds what is alive without being saved: the loss, positions, rotary tables.
    alive_unsaved_bytes = 8 * SEQ * (spec.head_dim + BATCH * 4) + 64
    # Falcon splits its heads by two lists of one index, 8 bytes each in every layer.
    indices_bytes = 2 * 8 * LAYERS if family == "falcon" else 0
    assert real - indices_bytes <= predicted <= real + alive_unsaved_bytes


def kept_by_one_more_layer(key: str, kind: str) -> tuple[Moments, Floats]:
    """The moments of a llama, and what one more layer adds to those of its loss: [component, *]."""
    deep, deeper = (
        load_moments(Traced("llama", key, (kind,) * layers), "kept") for layers in (5, 6)
    )
    assert deep.monomials == deeper.monomials
    row, other = (m.place.index(Place("loss")) for m in (deep, deeper))
    return deep, deeper.constant[other] - deep.constant[row]


def test_an_inner_llama_layer_keeps_the_bytes_counted_by_hand() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    moments, added = kept_by_one_more_layer("sdpa/bf16/none", PLAIN)
    values = monomial_values(spec, moments.monomials, 1, 1)
    per_layer = dict(zip(COMPONENTS, added @ values, strict=True))
    # Per token: two norms of (fp32 copy 4h, 1/rms 4, normalised 2h, scaled 2h); Q, output 2 B x
    # 4096 each; K, V 2 B x 1024 each; logsumexp 4 B x 32; gate, silu, up, product 2 B x 14336 each.
    by_hand = 2 * (8 * 4096 + 4) + 4 * 4096 + 4 * 1024 + 4 * 32 + 8 * 14336
    assert by_hand == 200_840
    assert sum(per_layer.values()) == by_hand
    assert per_layer["activations"] == by_hand


def test_full_checkpointing_keeps_one_layer_input_per_layer() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    moments, added = kept_by_one_more_layer("sdpa/bf16/full", CHECKPOINTED)
    assert (added @ monomial_values(spec, moments.monomials, 1, 1)).sum() == 2 * 4096


def test_eager_attention_keeps_two_bf16_and_one_fp32_score_matrix_at_most() -> None:
    moments, added = kept_by_one_more_layer("eager/bf16/none", PLAIN)
    column = moments.monomials.index("batch*seq*seq*kv_heads*group")
    # softmax runs in fp32 and saves its output (4 B); the bf16 probabilities feed the product (2 B).
    assert added[COMPONENTS.index("attention"), column] == 6


def test_the_loss_backward_peaks_at_12_bytes_per_token_and_vocabulary_entry() -> None:
    moments = load_moments(Traced("llama", "sdpa/bf16/none", (PLAIN,) * 4), "kept")
    column = moments.monomials.index("batch*seq*vocab")
    rows = [i for i, place in enumerate(moments.place) if place == Place("loss_backward")]
    assert max(moments.constant[rows][:, :, column].sum(axis=1)) == 12


def test_repeated_layers_are_looked_at_where_a_peak_can_be() -> None:
    moments = load_moments(Traced("llama", "sdpa/bf16/none", (PLAIN,) * 80), "kept")
    layers = {place.layer for place in moments.place if place.section == "layer_backward"}
    assert {0, 1, 78, 79} <= layers
    assert len(layers) <= 6


@pytest.mark.parametrize(
    ("attention", "length", "kind"),
    [
        (Attention.SDPA, 4095, PLAIN),
        (Attention.SDPA, 4096, SLIDING),
        (Attention.EAGER, 512, SLIDING),
        (Attention.TRITON, 100, PLAIN),
    ],
)
def test_a_window_masks_sdpa_once_the_sequence_reaches_it(
    attention: Attention, length: int, kind: str
) -> None:
    spec = resolve_model("mistralai/Mistral-7B-v0.1")
    template = traced(spec, TrainingWorkload(attention=attention), length)
    assert template == Traced("mistral", f"{attention}/bf16/none", (kind,) * 32)


def variant(model: str, attention: Attention, precision: Precision, rows: int = 2) -> str:
    workload = TrainingWorkload(attention=attention, precision=precision, micro_batch=rows)
    return traced(resolve_model(model), workload, 512).key.split("/")[0]


def test_models_without_grouped_heads_have_their_own_variants() -> None:
    llama2 = "meta-llama/Llama-2-7b-hf"
    assert variant(llama2, Attention.EAGER, Precision.BF16) == "eager_mha"
    assert variant(llama2, Attention.SDPA, Precision.FP32) == "sdpa_mha"
    assert variant(llama2, Attention.SDPA, Precision.BF16) == "sdpa"


def test_eager_attention_of_one_row_is_traced_by_itself() -> None:
    """Where it was: else the trace of several rows stands for it."""
    llama2, eager = "meta-llama/Llama-2-7b-hf", Attention.EAGER
    assert variant(llama2, eager, Precision.MIXED, rows=1) == "eager_mha_single"
    assert variant(llama2, eager, Precision.FP32, rows=1) == "eager_mha"
    assert variant(llama2, Attention.SDPA, Precision.MIXED, rows=1) == "sdpa"


def test_eager_attention_of_one_row_copies_no_head_as_the_real_product() -> None:
    """Its template's layer has the copies of queries, keys and values fewer that torch makes."""
    spec = resolve_model("meta-llama/Llama-2-7b-hf", {"num_hidden_layers": 3})
    made = {}
    for rows in (1, 2):
        workload = TrainingWorkload(
            attention=Attention.EAGER, micro_batch=rows, sequence_length=512
        )
        sequence = load_steps(traced(spec, workload, 512), "kept")
        values = monomial_values(spec, sequence.steps.monomials, rows, 512)
        layer = allocations(sequence.rows(Place("layer", 1)))
        made[rows] = sum(values[row[1]] * row[2] == 2 * rows * 512 * 4096 for row in layer)
    heads = {rows: torch.empty(rows, 512, 32, 128).transpose(1, 2) for rows in (1, 2)}
    copies = {
        rows: head.reshape(-1, 512, 128).data_ptr() != head.data_ptr()
        for rows, head in heads.items()
    }
    assert copies == {1: False, 2: True}
    assert made[2] - made[1] == 3


def test_gpt2_is_never_told_apart_by_grouping() -> None:
    assert variant("openai-community/gpt2", Attention.EAGER, Precision.FP32) == "eager"


def test_layers_that_were_not_traced_in_this_order_are_refused() -> None:
    kinds = (PLAIN, PLAIN, FROZEN, PLAIN)
    with pytest.raises(PlanError, match="has not been traced"):
        load_steps(Traced("llama", "sdpa/bf16/none", kinds), "kept")
