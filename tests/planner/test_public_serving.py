"""Public reports of serving engines: what is read, and how near weights and cache come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.public_serving import (
    ServingAnswer,
    ServingCase,
    ServingCases,
    answer,
    read_serving_cases,
)
from planner.units import GIB_BYTES

PUBLIC = Path(__file__).resolve().parents[2] / "recorded" / "public"
ROW: dict[str, Any] = {
    "id": "a-case",
    "report": "GT-1",
    "source": "somewhere",
    "label": "an engine",
    "model": {"preset": "meta-llama/Llama-3.1-8B"},
    "visible_bytes": 80 * GIB_BYTES,
    "utilization": 0.5,
    "overhead_bytes": GIB_BYTES,
    "weights_bytes": 16_060_522_496,
    "note": "Nothing is open.",
}
# 8,030,261,248 parameters of Llama 3.1 8B in bf16.
LLAMA_BYTES = 16_060_522_496
# Printed to 1 MiB over 16,384 tokens, or to 0.01 GiB over the tokens of a pool.
TOKEN_BYTES_ROUNDING = 64
# The pool is one worker's and the tokens another's.
OTHER_WORKER = "i21348-qwen3-235b-vllm"
# vLLM pads 2,880 columns to 3,072: all experts are 1/15 larger.
PADDED = "v11-gpt-oss-20b"


def _case(tmp_path: Path, **changes: Any) -> ServingCase:
    row = {name: value for name, value in {**ROW, **changes}.items() if value is not None}
    file = tmp_path / "serving.json"
    file.write_text(json.dumps({"cases": [row], "not_planned": {}, "left_out": {}}))
    return read_serving_cases(file).cases[0]


@pytest.fixture(scope="module")
def recorded() -> ServingCases:
    return read_serving_cases(PUBLIC / "serving.json")


@pytest.fixture(scope="module")
def answers(recorded: ServingCases) -> dict[str, ServingAnswer]:
    return {found.case.id: found for found in recorded.answers()}


def test_the_cache_is_what_weights_and_the_engine_leave(tmp_path: Path) -> None:
    found = answer(_case(tmp_path, pool_bytes=40 * GIB_BYTES - LLAMA_BYTES - GIB_BYTES))
    assert found.weights_bytes == LLAMA_BYTES and found.weights_percent == 0
    assert found.pool_bytes == 39 * GIB_BYTES - LLAMA_BYTES and found.capacity_percent == 0
    assert found.tokens == (39 * GIB_BYTES - LLAMA_BYTES) // 131_072


@pytest.mark.parametrize(("length", "outcome"), [(196_000, "ran"), (197_500, "refused")])
def test_a_request_is_refused_where_its_cache_does_not_fit(
    tmp_path: Path, length: int, outcome: str
) -> None:
    # (39 GiB - 16,060,522,496) / 131,072 = 196,957 tokens.
    assert answer(_case(tmp_path, context_length=length)).outcome == outcome


def test_weights_that_leave_nothing_are_said_as_a_negative_cache(tmp_path: Path) -> None:
    found = answer(_case(tmp_path, visible_bytes=20 * GIB_BYTES))
    assert found.pool_bytes == 9 * GIB_BYTES - LLAMA_BYTES < 0
    assert (found.tokens, found.outcome) == (0, "refused")


def test_key_value_heads_are_repeated_beyond_their_number(tmp_path: Path) -> None:
    # Llama 3.1 8B: 8 heads of 128 in 32 layers, keys and values in bf16.
    whole = 2 * 32 * 8 * 128 * 2
    for shards, share in ((1, whole), (4, whole // 4), (8, whole // 8), (16, whole // 8)):
        assert answer(_case(tmp_path, tensor_parallel=shards)).token_bytes == share


@pytest.mark.parametrize("changes", [{"weights_bytes": None}, {"outcome": "maybe"}])
def test_a_case_needs_something_measured(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a-case"):
        _case(tmp_path, **changes)


def test_every_serving_report_is_in_or_left_out_once(recorded: ServingCases) -> None:
    left_out = [report for ids in recorded.left_out.values() for report in ids]
    found = [*{case.report for case in recorded.cases}, *recorded.not_planned, *left_out]
    training = json.loads((PUBLIC / "training.json").read_text())["left_out"]
    assert sorted(found) == sorted(training["Serving or inference: no training step"])


def test_published_weights_are_predicted_within_one_and_a_half_percent(
    answers: dict[str, ServingAnswer],
) -> None:
    errors = {
        name: found.weights_percent
        for name, found in answers.items()
        if found.weights_percent is not None and name not in (PADDED, "v11-mistral-small")
    }
    assert len(errors) > 25
    assert max(map(abs, errors.values())) < 1.5


def test_gpt_oss_comes_out_with_its_padded_experts(answers: dict[str, ServingAnswer]) -> None:
    # 24 layers x 32 experts of 2880 x 5760 and 2880 x 2880, each element 4.25 bits.
    experts = 24 * 32 * (2880 * 5760 + 2880 * 2880) * 17 // 32
    found = answers[PADDED]
    assert found.case.weights_bytes is not None
    padded = found.weights_bytes + experts * (3072 - 2880) / 2880
    assert padded == pytest.approx(found.case.weights_bytes, rel=0.005)


def test_published_cache_bytes_of_a_token_are_exact(answers: dict[str, ServingAnswer]) -> None:
    found = [a for a in answers.values() if a.case.token_bytes and a.case.id != OTHER_WORKER]
    assert len(found) == 9
    for one in found:
        assert one.case.token_bytes is not None
        assert abs(one.token_bytes - one.case.token_bytes) <= TOKEN_BYTES_ROUNDING, one.case.id


def test_the_cache_holds_what_engines_printed_within_three_percent(
    answers: dict[str, ServingAnswer],
) -> None:
    errors = [a.capacity_percent for a in answers.values() if a.capacity_percent is not None]
    assert len(errors) > 20
    assert max(map(abs, errors)) < 3


def test_what_engines_refused_is_refused(answers: dict[str, ServingAnswer]) -> None:
    known = [found for found in answers.values() if found.case.outcome is not None]
    assert len(known) == 11
    assert all(found.outcome == found.case.outcome for found in known)
