"""What a probe of quality is asked, and how its tables keep system and algorithm apart."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlanError
from planner.quality_run import (
    QUALITY_COLUMNS,
    Change,
    Variable,
    change_verdict,
    parse_quality,
    quality_cells,
    quality_sentences,
    variable_of,
)

ROW: dict[str, Any] = {"kl_mean": 0.1, "max_abs": 1.0, "same_choice": 0.5, "perplexity": 9.0}
MODEL = {"preset": "llama-3.2-1b"}


def part(**changes: float) -> dict[str, Any]:
    """A table whose changes moved the largest logit by so much."""
    return {
        "exact": {**ROW, "accuracy": 1.0, "near": 1.0, "far": 0.98},
        "floor": 1e-5,
        "settings": {"window": 16},
        "chance": 0.125,
        "changes": {name: {**ROW, "max_abs": by} for name, by in changes.items()},
    }


def test_a_change_is_the_algorithm_s_or_the_system_s() -> None:
    system = {change for change in Change if variable_of(change) is Variable.SYSTEM}
    assert system == {Change.PAGED, Change.KERNEL, Change.FP8_CACHE, Change.INT8_CACHE}


@pytest.mark.parametrize(
    ("change", "moved", "word"),
    [
        (Change.PAGED, 0.0, "no change"),
        (Change.PAGED, 3.9e-5, "rounding"),
        (Change.KERNEL, 4.1e-5, "wrong: must not change"),
        (Change.FP8_CACHE, 0.05, "rounds the cache"),
        (Change.FP8_CACHE, 2e-5, "rounding"),
        (Change.WINDOW, 0.05, "another model"),
        (Change.WINDOW, 0.0, "no change"),
    ],
)
def test_what_a_change_did_is_told_by_four_times_the_floor(
    change: Change, moved: float, word: str
) -> None:
    assert change_verdict(change, {"max_abs": moved}, 1e-5) == word


def test_the_table_has_the_system_s_rows_before_the_algorithm_s() -> None:
    rows = quality_cells(part(window=1.0, int8_cache=0.01, paged=0.0))
    assert [row[:2] for row in rows] == [
        ("exact", "-"),
        ("paged cache", "system"),
        ("int8 cache", "system"),
        ("sliding window", "algorithm"),
    ]
    assert {len(row) for row in rows} == {len(QUALITY_COLUMNS)}


def test_the_sentences_say_what_a_window_cannot_recall() -> None:
    found = part(window=1.0, paged=0.0)
    found["changes"]["window"] |= {"near": 1.0, "far": 0.12}
    lines = quality_sentences({"models": {"recall": found}})
    assert lines[0] == "recall: paged cache left the answers alone, to rounding."
    assert "a window of 16 the small model recalls 100 % of what it can see and 12 %" in lines[1]
    assert "exact attention: 98 %; by chance 12 %" in lines[1]
    wrong = quality_sentences({"models": {"m": part(paged=0.1)}})
    assert wrong == ["m: paged cache changed the answers, which must not be."]


def test_a_cpu_has_all_changes_but_our_kernels_and_fp32() -> None:
    run, model = parse_quality({}, "cpu")
    assert set(run.changes) == set(Change) - {Change.KERNEL}
    assert (run.dtype, model) == ("fp32", None)
    on_gpu, _ = parse_quality({"model": MODEL}, "solo")
    assert (Change.KERNEL in on_gpu.changes, on_gpu.dtype) == (True, "bf16")
    assert parse_quality(run.to_dict(), "cpu")[0] == run


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"changes": ["kernel"]}, "our kernels need a GPU"),
        ({"changes": []}, "quality.changes is"),
        ({"changes": ["magic"]}, "quality.changes is 'magic': it must be one of paged"),
        ({"length": 31}, "quality.length is 31"),
        ({"recall_steps": 0}, "quality.recall_steps is 0"),
        ({"weights": "here"}, "quality.weights is 'here'"),
        ({"weights": "/here"}, "quality.weights is '/here': it must be left out"),
        ({"model": {"preset": "gpt2"}, "length": 2048}, "the positions of"),
        ({"windo": 3}, "windo"),
        ({"model": MODEL, "kv_heads": 3}, "quality.kv_heads is 3: it must be a divisor below 8"),
        ({"model": {"preset": "gemma-2-9b"}}, "quality.model is"),
    ],
)
def test_what_cannot_be_probed_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError) as problem:
        parse_quality(given, "cpu")
    assert sentence in str(problem.value)
