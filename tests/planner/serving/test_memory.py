"""Weights, key-value cache and what fits, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.config_input import spec_from_config
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.serving.memory import (
    CONTEXT_BYTES,
    ServingMemory,
    kv_bytes_per_token,
    kv_sequence_bytes,
    quantised_bytes,
    serving_memory,
)
from planner.workload import KvDtype, ServingWorkload, WeightsDtype

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
GEMMA = resolve_model("google/gemma-2-9b")
H200_BYTES = 150_109_880_320
LLAMA_PARAMETERS = 8_030_261_248
# q and o 4096 x 4096, k and v 1024 x 4096, three products 4096 x 14336.
LLAMA_LINEAR_PER_LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336


def mistral_small() -> ModelSpec:
    """Return the shape of Mistral-Small-24B."""
    config = {
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
    }
    return spec_from_config(config, name="mistral-small-24b")


def memory_of(spec: ModelSpec = LLAMA, **workload: Any) -> ServingMemory:
    """Return the memory of a workload on an H200."""
    return serving_memory(spec, ServingWorkload(**workload), H200_BYTES)


def test_cache_bytes_per_token_of_published_models() -> None:
    # 28.20 GiB held 184,832 tokens of Mistral-Small-24B: 163,840 B each.
    assert kv_bytes_per_token(mistral_small(), KvDtype.BF16) == 163_840 == 2 * 40 * 8 * 128 * 2
    assert kv_bytes_per_token(LLAMA, KvDtype.BF16) == 131_072
    # Multi-head attention: GPT-2 XL keeps 25 heads of 64 in 48 layers.
    assert kv_bytes_per_token(resolve_model("gpt2-xl"), KvDtype.BF16) == 2 * 48 * 25 * 64 * 2
    # Multi-query attention: one head.
    single = resolve_model("meta-llama/Llama-3.1-8B", {"num_key_value_heads": 1})
    assert kv_bytes_per_token(single, KvDtype.BF16) == 2 * 32 * 128 * 2


def test_latent_attention_caches_one_latent_for_all_heads() -> None:
    # DeepSeek-V3 keeps 70.272 KB per token ("Insights into DeepSeek-V3", table 1): 512 latent and
    # 64 rotated elements in 61 layers.
    spec = resolve_model("deepseek-ai/DeepSeek-V3")
    assert kv_bytes_per_token(spec, KvDtype.BF16) == 70_272 == 61 * (512 + 64) * 2
    assert kv_bytes_per_token(spec, KvDtype.INT8) == 61 * (512 + 64 + 2 * 4)
    memory = memory_of(spec, context_length=1000, sequences=3)
    (cache,) = [entry for entry in memory.ledger if entry.component == "kv_cache"]
    assert (cache.shape, cache.bytes) == ((3, 1000, 576), 3 * 1000 * 70_272)
    lite = resolve_model("deepseek-ai/DeepSeek-V2-Lite")
    assert kv_bytes_per_token(lite, KvDtype.BF16) == 27 * 576 * 2


def test_one_key_value_head_and_short_windows_make_small_caches() -> None:
    falcon = resolve_model("tiiuae/falcon-7b")
    assert kv_bytes_per_token(falcon, KvDtype.BF16) == 2 * 32 * 64 * 2
    # Of 26 layers four see everything, 22 the last 512 tokens.
    gemma = resolve_model("google/gemma-3-1b-it")
    assert kv_sequence_bytes(gemma, KvDtype.BF16, 4096) == (4 * 4096 + 22 * 512) * 2 * 256 * 2


def test_what_gpt_oss_adds_to_its_experts_stays_in_sixteen_bits() -> None:
    spec = resolve_model("openai/gpt-oss-20b")
    memory = memory_of(spec, weights_dtype=WeightsDtype.INT8)
    stored = {entry.name.split("layers.0.")[-1]: entry for entry in memory.ledger}
    for name in ("mlp.router.weight", "mlp.experts.down_proj_bias", "self_attn.sinks"):
        assert stored[name].dtype == "bf16"
    # Its experts store inputs as rows: one scale for each of 32 x 2 x 2880 outputs.
    gate_up = stored["mlp.experts.gate_up_proj"]
    assert gate_up.bytes == 24 * (32 * 2880 * 5760 + 2 * 32 * 5760)


def test_the_widest_moment_counts_the_experts_that_a_token_visits() -> None:
    def width(name: str) -> int:
        (entry,) = [e for e in memory_of(resolve_model(name)).ledger if "prefill.act" in e.name]
        return entry.shape[1]

    assert width("Qwen/Qwen3-30B-A3B") == 2 * 2048 + 3 * 8 * 768
    # Keys of 192 and values of 128 in 128 heads, beside as many queries and outputs.
    attention = 2 * 128 * 192 + 2 * 128 * 128
    assert width("deepseek-ai/DeepSeek-V3") == 2 * 7168 + max(attention, 3 * 18432)
    assert width("facebook/opt-6.7b") == 2 * 4096 + 2 * 16384


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [
        (KvDtype.FP32, 262_144),
        (KvDtype.FP16, 131_072),
        (KvDtype.FP8, 65_536),
        # 8 heads x 2 x 32 layers each add an fp32 scale.
        (KvDtype.INT8, 65_536 + 8 * 2 * 32 * 4),
    ],
)
def test_cache_bytes_follow_the_element_type(dtype: KvDtype, per_token: int) -> None:
    assert kv_bytes_per_token(LLAMA, dtype) == per_token


def test_a_window_caps_what_a_request_keeps_in_its_layers() -> None:
    per_layer = 2 * 8 * 256 * 2
    assert kv_sequence_bytes(GEMMA, KvDtype.BF16, 4096) == 42 * 4096 * per_layer
    assert kv_sequence_bytes(GEMMA, KvDtype.BF16, 8192) == (21 * 8192 + 21 * 4096) * per_layer
    mistral = resolve_model("mistralai/Mistral-7B-v0.1")
    assert kv_sequence_bytes(mistral, KvDtype.BF16, 32768) == 4096 * 131_072


def test_weights_in_sixteen_bits_are_two_bytes_a_parameter() -> None:
    assert memory_of().weights_bytes == 2 * LLAMA_PARAMETERS
    assert memory_of(weights_dtype=WeightsDtype.FP32).weights_bytes == 4 * LLAMA_PARAMETERS


def test_quantisers_leave_embedding_head_and_norms_in_sixteen_bits() -> None:
    linear = 32 * LLAMA_LINEAR_PER_LAYER
    rest = 2 * (LLAMA_PARAMETERS - linear)
    # Seven weights a layer share one fp32 scale each.
    assert memory_of(weights_dtype=WeightsDtype.FP8).weights_bytes == rest + linear + 32 * 7 * 4
    rows = 4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096
    int8 = memory_of(weights_dtype=WeightsDtype.INT8).weights_bytes
    assert int8 == rest + linear + 32 * rows * 2
    # 64 bytes of a group of 128 carry 2 bytes of scale and half a byte of zero point.
    int4 = memory_of(weights_dtype=WeightsDtype.INT4).weights_bytes
    assert int4 == rest + linear // 128 * 133 // 2
    assert int4 == 5_727_854_592


def test_a_group_that_is_not_full_has_its_own_scale() -> None:
    assert quantised_bytes(3 * 130, 130, 3, WeightsDtype.INT4) == 195 + 2 * 6 + 3


def test_mxfp4_stores_experts_with_a_scale_of_one_byte_for_each_32_inputs() -> None:
    assert quantised_bytes(40 * 3, 40, 3, WeightsDtype.MXFP4) == 60 + 2 * 3
    spec = resolve_model("openai/gpt-oss-20b")
    # Per layer 32 experts of 2880 x 5760 and 2880 x 2880 at 4.25 bits an element.
    experts = 24 * 32 * (2880 * 5760 + 2880 * 2880)
    weights = memory_of(spec, weights_dtype=WeightsDtype.MXFP4).weights_bytes
    assert weights == experts * 17 // 32 + 2 * (spec.parameters - experts)


def test_mxfp4_stores_every_matrix_of_a_dense_model_s_layers() -> None:
    weights = memory_of(weights_dtype=WeightsDtype.MXFP4).weights_bytes
    linear = 32 * LLAMA_LINEAR_PER_LAYER
    assert weights == linear * 17 // 32 + 2 * (LLAMA_PARAMETERS - linear)


def test_gpt2_stores_inputs_as_rows() -> None:
    spec = resolve_model("gpt2")
    rows = 3 * 768 + 768 + 3072 + 768
    linear = 768 * 3 * 768 + 768 * 768 + 2 * 768 * 3072
    memory = memory_of(spec, context_length=1024, weights_dtype=WeightsDtype.INT8)
    assert memory.weights_bytes == 2 * (spec.parameters - 12 * linear) + 12 * (linear + 2 * rows)


def test_the_router_stays_in_sixteen_bits() -> None:
    memory = memory_of(resolve_model("mixtral-8x7b"), weights_dtype=WeightsDtype.FP8)
    stored = {entry.name.rsplit("0.", 1)[-1]: entry.dtype for entry in memory.ledger}
    assert stored["mlp.gate.weight"] == "bf16"
    assert stored["mlp.experts.down_proj"] == "fp8"


def test_the_ledger_sums_to_every_total() -> None:
    memory = memory_of(GEMMA, sequences=64, weights_dtype=WeightsDtype.INT4)
    data = memory.to_dict()
    for phase in data["phases"]:
        entries = [e for e in data["ledger"] if phase["name"] in e["phases"]]
        assert phase["allocated_bytes"] == sum(e["bytes"] for e in entries)
        assert phase["allocated_bytes"] == sum(phase["parts"].values())
    assert data["allocated_bytes"] == sum(row["bytes"] for row in data["components"])
    assert data["allocated_bytes"] == max(p["allocated_bytes"] for p in data["phases"])
    overheads = sum(row["bytes"] for row in data["overheads"])
    assert data["device_bytes"] == data["allocated_bytes"] + overheads
    cache = [e for e in memory.ledger if e.component == "kv_cache"]
    assert sum(e.bytes for e in cache) == 64 * kv_sequence_bytes(GEMMA, KvDtype.BF16, 8192)


def test_a_component_s_formula_speaks_of_all_of_it() -> None:
    data = memory_of(GEMMA, sequences=2, weights_dtype=WeightsDtype.FP8).to_dict()
    formulas = {row["name"]: row["formula"] for row in data["components"]}
    linear = 42 * (2 * 3584 * 4096 + 2 * 3584 * 2048 + 3 * 3584 * 14336)
    assert f"{linear:,} parameters in fp8" in formulas["parameters"]
    assert f"{GEMMA.parameters - linear:,} parameters in bf16" in formulas["parameters"]
    assert "21 layers x 2 sequences x 8,192 tokens" in formulas["kv_cache"]
    assert "21 layers x 2 sequences x 4,096 tokens" in formulas["kv_cache"]
    plain = memory_of().to_dict()["components"][0]["formula"]
    assert plain == "8,030,261,248 parameters in bf16"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([LLAMA, GEMMA, resolve_model("Qwen/Qwen2.5-0.5B")]),
    st.integers(1, 20_000),
    st.sampled_from(list(WeightsDtype)),
    st.sampled_from(list(KvDtype)),
    st.floats(0.3, 1.0),
)
def test_the_largest_number_of_sequences_fits_and_one_more_does_not(
    spec: ModelSpec, context: int, weights: WeightsDtype, cache: KvDtype, utilization: float
) -> None:
    workload = ServingWorkload(
        context_length=context,
        sequences=1,
        weights_dtype=weights,
        kv_dtype=cache,
        utilization=utilization,
    )
    most = serving_memory(spec, workload, H200_BYTES).max_sequences
    for sequences in (most, most + 1):
        memory = serving_memory(spec, replace(workload, sequences=max(sequences, 1)), H200_BYTES)
        fits = 0 < sequences <= most
        assert memory.fits_sequences == fits
        assert (memory.device_bytes <= memory.budget_bytes) == fits


def test_pool_and_tokens_of_an_h200() -> None:
    memory = memory_of()
    usable = (int(0.9 * H200_BYTES) - CONTEXT_BYTES) // 2_097_152 * 2_097_152
    # Prefill: 2048 tokens x (2 x 4096 + 3 x 14336) x 2 B; one row of logits in 2 + 4 bytes.
    activations = 2048 * (2 * 4096 + 3 * 14336) * 2 + 128_256 * 6
    assert memory.activation_bytes == activations
    assert memory.kv_pool_bytes == usable - 2 * LLAMA_PARAMETERS - activations
    assert memory.max_tokens == memory.kv_pool_bytes // 131_072
    assert memory.max_sequences == memory.kv_pool_bytes // (8192 * 131_072)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2**24), st.integers(1, 65536))
def test_more_tokens_and_more_sequences_never_need_less(context: int, sequences: int) -> None:
    workload = ServingWorkload(context_length=context, sequences=sequences)
    base = serving_memory(GEMMA, workload, H200_BYTES)
    longer = replace(workload, context_length=context + 1)
    more = replace(workload, sequences=sequences + 1)
    for bigger in (longer, more):
        other = serving_memory(GEMMA, bigger, H200_BYTES)
        assert other.allocated_bytes >= base.allocated_bytes
        assert other.device_bytes >= base.device_bytes


def test_a_model_too_large_for_the_card_has_no_pool() -> None:
    memory = serving_memory(resolve_model("llama-3.1-405b"), ServingWorkload(), H200_BYTES)
    assert (memory.kv_pool_bytes, memory.max_tokens, memory.max_sequences) == (0, 0, 0)
    assert not memory.fits_sequences
    assert memory.serving_dict(4)["max_sequences_all_replicas"] == 0
