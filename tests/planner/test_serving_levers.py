"""Levers of serving: what each changes, by hand where that is arithmetic, ordered where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import PlanError
from planner.hardware import resolve_gpu
from planner.plan import parse_model
from planner.serving_levers import (
    ServingPoint,
    answer,
    capacity_curve,
    check_point,
    levers,
    speed_curve,
    step_times,
)
from planner.workload import KvDtype

LLAMA, _ = parse_model({"preset": "llama-3.1-8b"})
DEEPSEEK, _ = parse_model({"preset": "deepseek-v2-lite"})
POINT = ServingPoint(spec=LLAMA, gpu=resolve_gpu("h200"))


def by_name(point: ServingPoint) -> dict[str, ServingPoint]:
    return {one.name: one.point for one in levers(point)}


def test_a_point_holds_whole_pages_half_way_or_its_whole_room() -> None:
    """2,048 + 256 / 2 = 2,176 tokens are 34 pages of 64; one more token is 35."""
    assert POINT.held_tokens == 2176
    assert replace(POINT, new_tokens=258).held_tokens == 35 * 64
    assert replace(POINT, paged=False).held_tokens == 8192
    assert replace(POINT, paged=False, longest_tokens=100).held_tokens == 2304


def test_capacity_is_the_pool_over_what_a_request_holds() -> None:
    """Llama 3.1 8B caches 2 x 8 heads x 128 x 2 B x 32 layers = 128 KiB a token."""
    found = answer(POINT)
    assert found.token_bytes == 131_072
    assert found.max_requests == found.pool_bytes // (2176 * 131_072)
    assert found.tokens_per_s == pytest.approx(16 / (found.decode_s or 0))
    fp8 = answer(replace(POINT, kv_dtype=KvDtype.FP8))
    assert fp8.max_requests == pytest.approx(2 * found.max_requests, rel=0.01)
    # Eight key-value heads instead of 32: a quarter of the cache.
    many = answer(by_name(POINT)["a key-value head per head (MHA)"])
    assert many.token_bytes == 4 * found.token_bytes


def test_levers_are_told_apart_and_each_changes_one_thing() -> None:
    found = {one.name: one for one in levers(POINT)}
    kinds = {one.kind for one in found.values()}
    assert kinds == {"system", "model"}
    assert found["one key-value head (MQA)"].kind == "model"
    assert found["no paging"].answer.max_requests == pytest.approx(
        answer(POINT).max_requests * 2176 / 8192, abs=2
    )
    assert found["twice as many at once"].point.batch == 32
    assert "window of 4,096 tokens" not in found
    assert "window of 4,096 tokens" in by_name(replace(POINT, prompt_tokens=8000))
    # What was not changed for a step has no limit to tell.
    assert found["no paging"].limit == found["twice as many at once"].limit == ""
    assert "attention over the cache" in found["one key-value head (MQA)"].limit
    # An fp8 cache halves bytes, not time: its kernel reads at a lower rate.
    fp8, base = found["cache in fp8"].answer, answer(POINT)
    assert fp8.token_bytes * 2 == base.token_bytes
    assert fp8.decode_s is not None and base.decode_s is not None
    assert fp8.decode_s > base.decode_s / 2
    assert found["tensor parallel 2"].answer.weights_bytes < 0.6 * base.weights_bytes


def test_latent_attention_has_no_key_value_heads_to_change() -> None:
    names = by_name(replace(POINT, spec=DEEPSEEK))
    assert not [name for name in names if "head" in name or "window" in name]


def test_a_batch_that_does_not_fit_has_no_speed() -> None:
    found = answer(replace(POINT, batch=100_000))
    assert (found.decode_s, found.tokens_per_s) == (None, None)
    assert found.max_requests < 100_000


def test_curves_fall_with_context_and_rise_with_batch() -> None:
    capacity = capacity_curve(POINT)
    assert [context for context, _ in capacity][-1] == 131_072
    assert [most for _, most in capacity] == sorted((m for _, m in capacity), reverse=True)
    speed = speed_curve(POINT, step_times(POINT), (1, 8, 64, 4096))
    assert [s for _, s, _ in speed] == sorted(s for _, s, _ in speed)
    assert [fits for _, _, fits in speed] == [True, True, True, False]


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(PlanError, match="32 attention heads cannot be divided by it"):
        check_point(replace(POINT, tensor_parallel=3))
    with pytest.raises(PlanError, match="passes the 131,072 positions of"):
        answer(replace(POINT, prompt_tokens=131_072))
