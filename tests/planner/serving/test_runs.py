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
from planner.records import Kind, RecordedRow, read_file
from planner.serve_run import parse_serve
from planner.serving.fitted import FITTED_PREFILLS, FITTED_STEPS, SERVE_ROWS
from planner.serving.runs import (
    RanAs,
    compare_served,
    decode_cache_bytes,
    decode_cells,
    predict_decode,
    serve_peak_bytes,
)

RECORDED = Path(__file__).resolve().parents[3] / "recorded/h200-decode.jsonl"
PROFILES = RECORDED.with_name("h200-profile.jsonl")
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


def test_a_prefill_started_kernel_by_kernel_is_no_evidence_for_a_graph(
    rows: list[RecordedRow],
) -> None:
    row = next(
        one
        for one in rows
        if one.kind is Kind.DECODE and one.measured.get("prefill_graph") and not fitted(one)
    )
    assert "prefill_time" in {one.quantity for one in compare_served(row)}
    measured = {name: value for name, value in row.measured.items() if name != "prefill_graph"}
    older = {one.quantity for one in compare_served(replace(row, measured=measured))}
    assert "prefill_by_host_time" in older and "prefill_time" not in older


def fitted(row: RecordedRow) -> frozenset[str]:
    """Return which times of a decode row a constant was fitted to."""
    sets = {"decode_time": FITTED_STEPS, "prefill_time": FITTED_PREFILLS}
    return frozenset(name for name, shapes in sets.items() if shape_of(row) in shapes)


def shape_of(row: RecordedRow) -> tuple[str, int, int]:
    given = row.spec["decode"]
    return given["model"].get("preset"), given["batch"], given["context"]


def test_shapes_that_set_a_constant_are_no_evidence_for_its_time(rows: list[RecordedRow]) -> None:
    decoded = [row for row in rows if row.kind is Kind.DECODE]
    for row in decoded:
        assert not fitted(row) & {one.quantity for one in compare_served(row)}
    # Every shape that is named is there, as a run or as a profile of one, else it names nothing.
    profiles = [row for row in read_file(PROFILES) if row.spec.get("decode")]
    assert {shape_of(row) for row in (*decoded, *profiles)} >= FITTED_STEPS | FITTED_PREFILLS
    assert {row.id for row in rows} >= SERVE_ROWS


def test_lone_prefills_that_set_the_power_s_factor_are_no_evidence(rows: list[RecordedRow]) -> None:
    # planner/serving/times.py: fitted to these models' lone prefills of 64 to 4,096 tokens.
    models = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
    decoded = [row for row in rows if row.kind is Kind.DECODE]
    lone = [r for r in decoded if shape_of(r)[:2] in {(m, 1) for m in models}]
    short = [row for row in lone if shape_of(row)[2] <= 4096]
    assert any(row.measured.get("prefill_graph") for row in short) and len(short) < len(lone)
    for row in short:
        assert "prefill_time" not in {one.quantity for one in compare_served(row)}


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
