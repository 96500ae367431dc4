"""Serving runs simulated on their GPU, beside what they measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlanError
from planner.hardware import resolve_gpu
from planner.records import Kind, read_file
from planner.serve_run import parse_serve
from planner.serving.runs import served_model
from planner.serving.times import StepTimes
from planner.simulation.continuous import simulate
from planner.simulation.runs import (
    compare_latency,
    compared_cells,
    expected_latency,
    simulate_asked,
    simulate_run,
    simulated_row,
    simulated_rows,
)
from planner.simulation.server import server_of
from planner.simulation.steps import RememberedSteps

H200 = resolve_gpu("h200")
RECORDED = Path(__file__).resolve().parents[2] / "recorded" / "h200-decode.jsonl"
TRACE = {"requests": 24, "rate_per_s": 30, "prompt_tokens": [100, 900], "new_tokens": [5, 40]}
ASKED: dict[str, Any] = {"model": {"preset": "llama-3.2-1b"}, "trace": TRACE, "pages": 64}


def test_remembered_steps_differ_from_asking_each_time_by_less_than_a_thousandth() -> None:
    run, model = parse_serve(ASKED)
    times = StepTimes(served_model(run, model, H200))
    found = [
        simulate(run.trace, server_of(run, model), one) for one in (times, RememberedSteps(times))
    ]
    assert found[1].steps == found[0].steps
    assert found[1].duration_s == pytest.approx(found[0].duration_s, rel=1e-3)
    for name, percentiles in found[0].latency.items():
        assert found[1].latency[name] == pytest.approx(percentiles, rel=1e-3)


def test_percentiles_stand_beside_measured_ones_with_signed_errors() -> None:
    run, model = parse_serve(ASKED)
    found = simulate_run(run, model, H200)
    p50_s = expected_latency(found)["ttft_s"]["p50"]
    measured = {"latency": {"ttft_s": {"p50": 2 * p50_s, "p90": 0.0}}}
    (compared,) = compare_latency(found, measured)
    assert compared.error_percent == pytest.approx(-50)
    assert compared_cells([compared])[0][:2] == ("time to first token", "p50")
    assert compared_cells([compared])[0][-1] == "-50.0 %"
    assert compare_latency(found, {}) == []


def test_percentiles_to_expect_hang_on_no_arrival_s_place_in_a_step() -> None:
    """Steps that all begin half a millisecond later move one simulation's tail, not the expected one."""
    run, model = parse_serve({**ASKED, "trace": {**TRACE, "requests": 48, "rate_per_s": 60}})
    found = [
        simulate_run(
            replace(
                run,
                trace=tuple(
                    replace(one, arrival_s=one.arrival_s + shift_s) for one in run.trace[1:]
                ),
            ),
            model,
            H200,
        )
        for shift_s in (0.0, 0.5e-3)
    ]
    expected = [expected_latency(one) for one in found]
    for name in ("ttft_s", "tpot_s"):
        for percent in ("p50", "p90"):
            first, second = (one[name][percent] for one in expected)
            assert second == pytest.approx(first, rel=0.04)
    # Each lies where the single simulations do.
    single = found[0].continuous.latency["tpot_s"]["p50"]
    assert expected[0]["tpot_s"]["p50"] == pytest.approx(single, rel=0.02)


def test_only_runs_of_our_kernels_on_a_known_gpu_are_simulated() -> None:
    spec = {"serve": ASKED}
    gpu = {"name": "NVIDIA H200", "memory_total_bytes": 150_754_820_096}
    assert simulated_row(spec, {"gpu": gpu}, None) is not None
    assert simulated_row(spec, {}, None) is None
    assert simulated_row({"serve": {**ASKED, "attention": "torch"}}, {"gpu": gpu}, None) is None
    assert (
        simulated_row({"serve": {"model": {"preset": "llama-3.2-1b"}}}, {"gpu": gpu}, None) is None
    )


def test_every_recorded_trace_is_simulated_with_all_its_requests() -> None:
    rows = [row for row in read_file(RECORDED) if row.kind is Kind.SERVE]
    found = simulated_rows(rows)
    assert [row.id for row, _ in found] == [row.id for row in rows]
    for row, simulated in found:
        assert simulated.continuous.states == row.measured["states"]
        assert simulated.continuous.tokens == sum(one[2] for one in row.measured["requests"])
        assert len(compare_latency(simulated, row.measured)) == 9


def test_a_long_trace_is_simulated_and_a_million_requests_are_refused() -> None:
    with pytest.raises(PlanError, match=r"trace\.requests is 1000000: it must be an integer from"):
        simulate_asked({**ASKED, "trace": {**TRACE, "requests": 1_000_000}}, H200)
    many = {**TRACE, "requests": 6000, "rate_per_s": 200, "new_tokens": [1, 4]}
    found = simulate_asked({**ASKED, "trace": many}, H200)
    assert found.continuous.states == found.static.states == {"done": 6000}
    assert len(found.continuous.requests) == 5000
