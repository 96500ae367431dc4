"""Times of prefill, decode and both: limits worked out by hand, and what must grow with what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.hardware import resolve_gpu
from planner.presets import resolve_model
from planner.serving.times import ServedModel, StepTimes
from planner.workload import KvDtype, WeightsDtype

ROOT = Path(__file__).resolve().parents[3]
H200 = resolve_gpu("h200")
BANDWIDTH_BYTES_S, PEAK_FLOP_S = 4.8e12, 989.5e12
LLAMA_LAYERS = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
LLAMA_HEAD = 4096 * 128256


def times(model: str = "meta-llama/Llama-3.1-8B", **served: Any) -> StepTimes:
    """Return the times of a model on an H200."""
    return StepTimes(ServedModel(spec=resolve_model(model), gpu=H200, **served))


def test_decoding_takes_longer_than_reading_weights_and_cache_at_the_sheets_rate() -> None:
    read = 2 * (LLAMA_LAYERS + LLAMA_HEAD) + 32 * 8192 * 131_072
    taken_s = times().decode_s(32, 32 * 8192)
    assert read / BANDWIDTH_BYTES_S < taken_s < 1.35 * read / BANDWIDTH_BYTES_S


def test_prefill_takes_longer_than_its_flops_at_the_peak() -> None:
    pairs = 8192 * 8193 / 2
    flops = 4 * (2 * 8192 * LLAMA_LAYERS + 32 * 4 * 4096 * pairs) + 4 * 2 * LLAMA_HEAD
    parts = times().prefill_parts(8192, 0, 4)
    assert sum(part.flops for part in parts) == pytest.approx(flops)
    assert flops / PEAK_FLOP_S < times().prefill_s(8192, 0, 4) < 1.7 * flops / PEAK_FLOP_S


def test_a_prompt_in_chunks_has_the_attention_of_the_whole() -> None:
    def attention_flops(tokens: int, context: int) -> float:
        parts = times().prefill_parts(tokens, context)
        return next(part.flops for part in parts if part.name == "attention")

    chunks = sum(attention_flops(512, before) for before in range(0, 4096, 512))
    assert chunks == pytest.approx(attention_flops(4096, 0))


def test_a_step_with_both_takes_as_long_as_one_after_the_other_and_the_host_between() -> None:
    found = times()
    empty_s = found.step_s(0, 0, 0, 0)
    prefill_s, decode_s = found.step_s(512, 1024, 0, 0), found.step_s(0, 0, 8, 8000)
    assert found.step_s(512, 1024, 8, 8000) == pytest.approx(prefill_s + decode_s - empty_s)
    for whole_s, forward_s in (
        (prefill_s, found.prefill_s(512, 1024)),
        (decode_s, found.decode_s(8, 8000)),
    ):
        assert empty_s < whole_s - forward_s < 0.5e-3


def test_a_chunk_whose_token_nobody_reads_hides_what_the_host_does() -> None:
    found = times()
    gpu_s = sum(part.time_s for part in found.prefill_parts(512, 1024) if part.bound != "host")
    assert found.step_s(512, 1024, 0, 0, False) == pytest.approx(gpu_s)
    assert found.step_s(512, 1024, 0, 0) > gpu_s + 0.3e-3
    # One that the host starts kernel by kernel hides nothing.
    eager = times(graphed_tokens=0)
    assert eager.step_s(512, 1024, 0, 0, False) == eager.step_s(512, 1024, 0, 0)


@pytest.mark.parametrize("dtype", [WeightsDtype.FP8, WeightsDtype.INT4])
def test_smaller_weights_decode_faster(dtype: WeightsDtype) -> None:
    assert times(weights_dtype=dtype).decode_s(1, 1000) < times().decode_s(1, 1000)


def test_a_scale_for_every_cached_token_costs_a_part_of_what_a_byte_less_saves() -> None:
    """Measured by itself, pages of 64: 154.5 us a layer, 253.6 over bf16; heads of 64, 64 x 4,096: 117.1 and 139.1."""
    for model, batch, context, ratio in (
        ("meta-llama/Llama-3.1-8B", 32, 8192, 154.5 / 253.6),
        ("meta-llama/Llama-3.2-1B", 64, 4096, 117.1 / 139.1),
    ):
        per_token, per_head, plain = (
            times(model, **options).decode_parts(batch, batch * context)[-1].time_s
            for options in (
                {"kv_dtype": KvDtype.FP8, "token_scales": True},
                {"kv_dtype": KvDtype.FP8},
                {},
            )
        )
        assert per_head < per_token < plain
        assert per_token / plain == pytest.approx(ratio, rel=0.05)


def test_the_kernels_of_a_profile_take_as_long_as_they_were_busy() -> None:
    """One prompt of 512 tokens and 31 steps after it; between two of a step's 263 kernels pass 0.38 us."""
    lines = (ROOT / "recorded/h200-profile.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if row["id"] == "cd78db38f6bf61a7")
    assert (row["spec"]["decode"]["batch"], row["spec"]["decode"]["context"]) == (1, 512)
    found = times("meta-llama/Llama-3.2-1B")
    steps_s = sum(found.decode_s(1, 512 + step) - 263 * 0.38e-6 for step in range(1, 32))
    prompt_s = sum(part.time_s for part in found.prefill_parts(512) if part.bound != "host")
    assert steps_s + prompt_s == pytest.approx(row["measured"]["busy_s"], rel=0.02)


def test_a_window_bounds_what_decoding_reads() -> None:
    mistral = times("mistralai/Mistral-7B-v0.1")
    assert mistral.decode_s(4, 4 * 4096) == mistral.decode_s(4, 4 * 32768)


def test_tensor_parallel_ranks_read_their_share_and_reduce_twice_a_layer() -> None:
    one, two = times(), times(tensor_parallel=2)
    sent = {part.name: part for part in two.decode_parts(8, 8000) if part.bound == "interconnect"}
    # A ring of two passes half of what is added up twice, of what is gathered once.
    assert sent["all_reduce"].bytes == (2 * 32 + 1) * 8 * 4096 * 2
    assert sent["all_gather"].bytes == 8 * 128_256 * 2 / 2
    products = [found.decode_parts(8, 8000)[0] for found in (one, two)]
    weights = 2 * LLAMA_LAYERS
    assert products[0].bytes - products[1].bytes == pytest.approx(weights / 2, rel=0.01)


def test_a_gpu_that_was_not_measured_says_so() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    other = StepTimes(ServedModel(spec=spec, gpu=resolve_gpu("h100-sxm5-80gb")))
    assert times().is_measured and not other.is_measured
    assert other.source.startswith("sheet of")
    assert other.decode_s(1, 1000) > times().decode_s(1, 1000)


def test_a_short_prefill_computes_faster_than_a_long_one() -> None:
    """By 1.09 / 0.87 for each token's products, which a GPU in its power limit does more slowly."""
    found = times()

    def each_s(tokens: int, rows: int) -> float:
        return found.prefill_parts(tokens, 0, rows)[0].time_s / (tokens * rows)

    assert each_s(1024, 16) / each_s(1024, 1) > 1.1
    assert found.prefill_s(1024) < 22e-3 < found.prefill_s(1024, 0, 2)


def test_a_prefill_without_a_graph_takes_the_host_s_time() -> None:
    assert times(graphed_tokens=0).prefill_s(512) > 2 * times().prefill_s(512)
    many = times().prefill_s(8192, 0, 2)
    assert times(graphed_tokens=0).prefill_s(8192, 0, 2) == many
    assert times(graphed_tokens=4096).prefill_s(512, 4096) > 2 * times().prefill_s(512, 4096)
