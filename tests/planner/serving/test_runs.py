"""Decode and serve runs predicted: bytes worked out by hand, errors on the recorded rows held to bounds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.accuracy import accuracy_report
from planner.decode_run import parse_decode
from planner.hardware import resolve_gpu
from planner.records import RecordedRow, read_file
from planner.serve_run import parse_serve
from planner.serving.runs import (
    RanAs,
    compare_served,
    decode_cache_bytes,
    decode_cells,
    predict_decode,
    serve_peak_bytes,
)
from planner.serving.times import DECODE_ROWS, PREFILL_ROWS, SERVE_ROWS

RECORDED = Path(__file__).resolve().parents[3] / "recorded/h200-decode.jsonl"
H200 = resolve_gpu("h200")
MIB = 2**20


def decode(model: str = "meta-llama/Llama-3.1-8B", **given: Any) -> Any:
    """Return a decode run and its model."""
    return parse_decode({"model": {"preset": model}, **given})


@pytest.fixture(scope="module")
def rows() -> list[RecordedRow]:
    return read_file(RECORDED)


def test_a_paged_cache_is_rounded_up_to_pages_and_a_contiguous_one_is_not() -> None:
    token_bytes = 32 * 2 * 8 * 128 * 2
    paged = decode(batch=3, context=1000, new_tokens=30, page_size=64)
    assert decode_cache_bytes(*paged) == 3 * 17 * 64 * token_bytes
    contiguous = decode(batch=3, context=1000, new_tokens=30, cache="contiguous")
    assert decode_cache_bytes(*contiguous) == 3 * 1030 * token_bytes


def test_one_byte_caches_hold_a_scale_for_each_token_and_head() -> None:
    run, spec = decode(context=64, new_tokens=64, cache_dtype="fp8")
    assert decode_cache_bytes(run, spec) == 128 * 32 * 2 * 8 * (128 + 4)


def test_latents_are_cached_as_the_keys_and_values_of_all_heads() -> None:
    run, spec = decode("deepseek-ai/DeepSeek-V2-Lite", context=64, new_tokens=64)
    assert decode_cache_bytes(run, spec) == 128 * 27 * 2 * 16 * 192 * 2


def test_prefill_holds_five_hidden_states_and_a_gated_mlp_beside_weights_and_cache() -> None:
    run, spec = decode(batch=2, context=1024, new_tokens=64)
    found = predict_decode(run, spec, H200)
    held = found.weights_bytes + found.cache_bytes
    wide = 2048 * (5 * 4096 + 3 * 14336) * 2
    assert found.weights_bytes == 2 * 8_030_261_248
    # A workspace, the graph's, and the spare page of 64 tokens.
    spare = 64 * 131_072
    assert found.prefill_peak_allocated_bytes == held + wide + spare + 2 * 32 * MIB
    before = predict_decode(run, spec, H200, RanAs(prefill_graphs=False))
    assert before.prefill_peak_allocated_bytes == held + wide + 32 * MIB


def test_rows_are_prefilled_as_many_at_once_as_have_32768_tokens() -> None:
    run, spec = decode(batch=6, context=16_384, new_tokens=64)
    three = replace(run, batch=2)
    assert predict_decode(run, spec, H200).prefill_time_s == pytest.approx(
        3 * predict_decode(three, spec, H200).prefill_time_s
    )


def test_serving_holds_a_workspace_for_every_width_that_is_captured_and_for_prefills() -> None:
    trace = [{"arrival_s": 0.0, "prompt_tokens": 100, "new_tokens": 20}]
    model = {"preset": "meta-llama/Llama-3.2-1B"}
    run, spec = parse_serve({"model": model, "trace": trace, "rows": 6, "pages": 10})
    # Widths 1, 2, 4 and 6: five workspaces, the logits of 13 rows, and a spare page.
    cache = 11 * 64 * 16 * 2 * 8 * 64 * 2
    wide = 100 * (5 * 2048 + 3 * 8192) * 2
    logits = 13 * 128_256 * 2
    assert serve_peak_bytes(run, spec) == 2_471_628_800 + cache + wide + logits + 5 * 32 * MIB


def test_predictions_of_recorded_rows_stay_as_near_as_they_are(rows: list[RecordedRow]) -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for residual in accuracy_report(rows).served:
        errors[residual.comparison.quantity].append(abs(residual.comparison.error_percent))
    mean = {name: sum(found) / len(found) for name, found in errors.items()}
    assert max(mean[name] for name in ("decode_weights", "decode_cache")) == 0
    assert max(mean["prefill_allocated"], mean["decode_allocated"]) < 0.5
    assert mean["serve_allocated"] < 1 and max(errors["serve_allocated"]) < 3
    assert mean["decode_time"] < 4 and max(errors["decode_time"]) < 15
    assert mean["prefill_time"] < 4 and max(errors["prefill_time"]) < 15
    # A prefill whose kernels the host started one by one, where today it is one graph, is no evidence for it.
    assert len(errors["prefill_by_host_time"]) > 10


def test_rows_that_set_a_constant_are_no_evidence_for_its_time(rows: list[RecordedRow]) -> None:
    for row in rows:
        quantities = {one.quantity for one in compare_served(row)}
        assert not ("decode_time" in quantities and row.id in DECODE_ROWS)
        assert not ("prefill_time" in quantities and row.id in PREFILL_ROWS)
    assert {row.id for row in rows} >= DECODE_ROWS | PREFILL_ROWS | SERVE_ROWS


def test_a_row_of_a_gpu_without_a_preset_is_not_compared(rows: list[RecordedRow]) -> None:
    gpu = {"name": "some accelerator", "total_bytes": 1}
    assert compare_served(replace(rows[0], environment={"gpu": gpu})) == []


def test_a_stored_run_s_prediction_is_told_beside_what_it_measured(rows: list[RecordedRow]) -> None:
    row = next(one for one in rows if "prefill_graph" in one.measured and one.spec["decode"])
    cells = decode_cells(row.spec["decode"], row.measured, row.environment)
    assert [line[0] for line in cells[:2]] == ["weights", "key-value cache"]
    assert {line[3] for line in cells[:2]} == {"+0.0 %"}
    assert cells[5][0] == "a step" and cells[5][1].endswith(" ms")
    assert decode_cells(row.spec["decode"], row.measured, {}) == []
    assert decode_cells({"model": {"preset": "no such"}}, row.measured, row.environment) == []
