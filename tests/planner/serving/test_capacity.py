"""What the cache holds, against numbers worked out by hand and what vLLM printed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.hardware import resolve_gpu
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.public_serving import ServingCase, read_serving_cases
from planner.serving.capacity import Capacity, ServingEngine, capacity, sequence_bytes
from planner.workload import KvDtype, ServingWorkload

CASES = Path(__file__).resolve().parents[3] / "recorded/public/serving.json"
LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
H200 = resolve_gpu("h200")
# Releases of the cases' ids, and the rule that stands for them.
RULES = {
    **dict.fromkeys(("v11", "v15", "v16"), ServingEngine.VLLM_0_11),
    **dict.fromkeys(("v17", "v18", "v19"), ServingEngine.VLLM_0_17),
}


def of(
    spec: ModelSpec = LLAMA, length: int = 8192, kv_dtype: KvDtype = KvDtype.BF16, **choices: Any
) -> Capacity:
    """Return the capacity of an H200 at utilization 0.9."""
    workload = ServingWorkload(context_length=length, kv_dtype=kv_dtype)
    return capacity(spec, workload, H200, **choices)


def test_a_request_is_rounded_up_to_pages() -> None:
    token_bytes = 32 * 2 * 8 * 128 * 2
    found = of(length=1000, page_tokens=64)
    assert found.sequence_bytes == 16 * 64 * token_bytes
    assert found.wasted_bytes == 24 * token_bytes
    assert of(length=1000, page_tokens=16).wasted_bytes == 8 * token_bytes
    assert of(length=1024, page_tokens=64).wasted_bytes == 0


def test_a_sliding_layer_keeps_its_window_and_the_page_in_which_it_begins() -> None:
    gemma = resolve_model("google/gemma-3-1b-it")
    workload = ServingWorkload(context_length=4000)
    layer_bytes = 2 * 256 * 2
    # 63 pages of 64 in the four layers that see everything, 512 / 64 + 1 in the other 22.
    expected = (4 * 63 + 22 * 9) * 64 * layer_bytes
    assert sequence_bytes(gemma, workload, 4000, 64) == expected
    assert sequence_bytes(gemma, workload, 4000, 1) == (4 * 4000 + 22 * 512) * layer_bytes


def test_the_pool_is_what_the_budget_leaves_and_holds_what_it_says() -> None:
    found = of()
    rest = found.weights_bytes + found.activation_bytes + found.graphs_bytes + found.outside_bytes
    assert found.pool_bytes == found.budget_bytes - rest
    assert found.max_sequences == found.pool_bytes // found.sequence_bytes == 109
    # 2,048 tokens of five hidden states and a gated MLP.
    assert found.activation_bytes == 2048 * (5 * 4096 + 3 * 14336) * 2
    # A workspace for each of the graphs of 1, 2, 4, ... 128 rows and one for those of prefills, as a served
    # run is predicted to hold (test_runs.py), and logits of at most twice 109 rows.
    assert found.graphs_bytes == 9 * 32 * 2**20 + 2 * 109 * 128_256 * 2
    free = found.pool_bytes - 109 * found.sequence_bytes
    assert found.max_tokens == 109 * 8192 + free // (64 * found.token_bytes) * 64


@pytest.mark.parametrize(("gpus", "copies"), [(2, 1), (8, 1), (16, 2), (32, 4)])
def test_key_value_heads_are_kept_once_or_repeated(gpus: int, copies: int) -> None:
    found = of(tensor_parallel=gpus)
    assert found.kv_copies == copies
    assert found.token_bytes == 32 * 2 * max(8 // gpus, 1) * 128 * 2
    assert any("key-value heads" in note for note in found.notes) == (copies > 1)


def test_no_shorter_request_joins_as_many_as_may_be_there_at_once() -> None:
    found = of(length=100, engine=ServingEngine.VLLM_0_11)
    assert (found.max_sequences, found.max_tokens) == (1024, 102_400)
    assert "at most 1,024 requests at once" in found.notes[0]
    few = of(rows=4)
    assert (few.max_sequences, few.max_tokens) == (4, 4 * 8192)


@pytest.mark.parametrize("engine", ServingEngine)
def test_an_int8_cache_that_older_releases_lack_is_said_of_vllm_alone(
    engine: ServingEngine,
) -> None:
    said = [any("int8" in n for n in of(kv_dtype=k, engine=engine).notes) for k in KvDtype]
    vllm = engine is not ServingEngine.PEAKMARK
    assert said == [vllm and k is KvDtype.INT8 for k in KvDtype]


def test_latents_are_whole_on_every_gpu() -> None:
    spec = resolve_model("deepseek-ai/DeepSeek-V3")
    found = of(spec, tensor_parallel=8)
    assert (found.token_bytes, found.kv_copies) == (70_272, 1)
    assert "Every GPU caches the whole latents" in found.notes[0]


@pytest.mark.parametrize("gpus", [3, 64])
def test_heads_that_cannot_be_divided_are_refused(gpus: int) -> None:
    with pytest.raises(PlanError, match=f"^tensor_parallel is {gpus}: "):
        of(tensor_parallel=gpus)


def test_a_model_that_leaves_nothing_holds_nothing() -> None:
    found = of(resolve_model("llama-3.1-405b"))
    assert (found.pool_bytes, found.max_sequences, found.max_tokens) == (0, 0, 0)


def printed() -> list[ServingCase]:
    """The pools that vLLM printed, but for the one whose profile differs."""
    return [
        case
        for case in read_serving_cases(CASES).cases
        if case.id[:3] in RULES and case.pool_bytes and case.utilization
        and case.id != "v11-mistral-small"
    ]  # fmt: skip


@pytest.mark.parametrize("case", printed(), ids=lambda case: case.id)
def test_vllms_rule_gives_the_pool_that_it_printed(case: ServingCase) -> None:
    source = case.model
    if "preset" in source:
        spec = resolve_model(source["preset"])
    else:
        spec = spec_from_config(source["config"], name=source["name"])
    workload = ServingWorkload(
        weights_dtype=case.weights_dtype, kv_dtype=case.kv_dtype, utilization=case.utilization or 0
    )
    gpu = replace(H200, visible_bytes=case.visible_bytes or 0)
    engine = RULES[case.id[:3]]
    found = capacity(spec, workload, gpu, engine=engine, tensor_parallel=case.tensor_parallel)
    assert found.pool_bytes == pytest.approx(case.pool_bytes, rel=0.015)
    assert found.page_tokens == 16
    if case.tokens:
        assert found.max_tokens == pytest.approx(case.tokens, rel=0.015)
