"""A decode step: what it reads and computes, worked out by hand, and how fast it is."""

from __future__ import annotations

from typing import Any

import pytest

from planner.decode import decode_throughput
from planner.hardware import resolve_gpu
from planner.presets import resolve_model
from planner.throughput import Throughput
from planner.workload import KvDtype, ServingWorkload, WeightsDtype

H200 = resolve_gpu("h200")


def decode(model: str = "llama-3.1-8b", replicas: int = 1, **workload: Any) -> Throughput:
    """Return the speed of a decode step on an H200."""
    spec, chosen = resolve_model(model), ServingWorkload(**workload)
    return decode_throughput(spec, chosen, H200, replicas)


def test_one_sequence_reads_all_weights_and_its_cache() -> None:
    result = decode(sequences=1, context_length=1000)
    layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    head = 4096 + 4096 * 128256 + 128256
    moved = 2 * layers + 1000 * 131_072 + 2 * head
    # Hidden states between kernels come on top.
    assert result.ideal_s == pytest.approx(moved / 4.8e12, rel=0.002)
    assert result.ideal_s < result.step_time_s < 1.8 * result.ideal_s
    assert result.bound == "hbm" and result.label == "from measured curves"
    assert result.tokens_per_s == pytest.approx(1 / result.step_time_s)


def test_flops_are_two_per_parameter_and_four_per_cached_pair() -> None:
    result = decode(sequences=3, context_length=500)
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    expected = 3 * (2 * (linear + 4096 * 128256) + 4 * 32 * 4096 * 500)
    assert result.flops_per_step == expected


def test_many_sequences_share_the_weights_and_replicas_add_up() -> None:
    one, many = decode(sequences=1), decode(sequences=64)
    assert many.tokens_per_s > 10 * one.tokens_per_s
    assert decode(sequences=64, replicas=4).tokens_per_s == 4 * many.tokens_per_s
    assert decode(sequences=64, replicas=4).tokens_per_s_per_gpu == many.tokens_per_s_per_gpu


def test_smaller_weights_decode_faster() -> None:
    times = [
        decode(sequences=1, weights_dtype=dtype).step_time_s
        for dtype in (WeightsDtype.FP32, WeightsDtype.BF16, WeightsDtype.FP8, WeightsDtype.INT4)
    ]
    assert times == sorted(times, reverse=True)


def test_an_fp8_cache_says_what_scales_for_each_token_would_cost() -> None:
    plain = decode(sequences=32, context_length=8192)
    found = decode(sequences=32, context_length=8192, kv_dtype=KvDtype.FP8)
    assert found.step_time_s < plain.step_time_s and plain.notes == ()
    [note] = found.notes
    assert note.startswith("The fp8 cache has one scale per tensor.")
    # Measured with such scales: 9.41 ms (`d1cc5b7b81be00e8`).
    ratio = float(note.split(" takes ")[1].split()[0])
    assert ratio * found.step_time_s == pytest.approx(9.41e-3, rel=0.05)


def test_a_window_bounds_what_decoding_reads() -> None:
    longer = decode("mistralai/Mistral-7B-v0.1", context_length=32768)
    assert (
        longer.step_time_s == decode("mistralai/Mistral-7B-v0.1", context_length=4096).step_time_s
    )


def test_latent_attention_decodes_on_the_latents() -> None:
    result = decode("deepseek-ai/DeepSeek-V3", sequences=2, context_length=700)
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    linear = 61 * attention + 3 * dense + 58 * (9 * expert + 7168 * 256)
    # Published: 37B parameters are active, with both vocabulary tables.
    assert linear + 2 * 129280 * 7168 == pytest.approx(37e9, rel=0.02)
    # A score needs 512 + 64 products, a value 512, in each of 128 heads.
    cached = 61 * 2 * 128 * (512 + 64 + 512) * 700
    assert result.flops_per_step == 2 * (2 * (linear + 129280 * 7168) + cached)


def test_few_tokens_read_few_experts() -> None:
    def product_bytes(sequences: int) -> float:
        result = decode("Qwen/Qwen3-30B-A3B", sequences=sequences)
        [found] = [op for op in result.operations if op.name == "products"]
        return float(found.bytes)

    other = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048
    expert = 3 * 2048 * 768
    # What a token's tensors move on top is small beside the weights.
    assert product_bytes(1) == pytest.approx(2 * 48 * (other + 8 * expert), rel=0.002)
    # The second token shares half of an expert of its eight with the first: 8 x 8 / 128.
    assert product_bytes(2) == pytest.approx(2 * 48 * (other + 15.5 * expert), rel=0.002)
    assert product_bytes(64) == pytest.approx(2 * 48 * (other + 126 * expert), rel=0.02)
