"""A calibration made here takes the place of the shipped curves, for its GPU and what it measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.calibration import Curve
from planner.hardware import resolve_gpu
from planner.levers import levers_of
from planner.plan import parse_plan
from planner.predict import predict
from planner.presets import resolve_model
from planner.search import grid
from planner.speed.calibrated import rates_of
from planner.speed.own import OwnCalibration, calibrated, own_calibrations
from planner.speed.stream_kinds import stream_number
from planner.sweep import sweep
from planner.sweep_axes import Limits, axes_of
from planner.throughput import training_throughput
from planner.workload import Parallelism, TrainingWorkload

H200, H100 = resolve_gpu("h200"), resolve_gpu("h100-sxm5-80gb")
LLAMA = resolve_model("meta-llama/Llama-3.1-8B")


def curve(operation: str, time_s: float, **values: Any) -> Curve:
    more = {"shape": (1,), "dtype": "bf16", "bytes": 0, "flops": 0.0, "n": 5} | values
    return Curve(operation=operation, time_s=time_s, **more)


def run(*curves: Curve, name: str = "NVIDIA H200", day: str = "2026-11-30") -> dict[str, Any]:
    gpu = {"name": name, "total_bytes": 150_109_880_320, "memory_total_bytes": 150_754_820_096}
    return {
        "measured": {"curves": [one.to_dict() for one in curves]},
        "environment": {"gpu": gpu},
        "recorded_at": f"{day}T10:00:00Z",
    }


def own(*curves: Curve) -> OwnCalibration:
    return own_calibrations([run(*curves)])[H200.id]


def test_newer_points_of_an_operation_take_the_place_of_older_ones() -> None:
    first, second = curve("kind_tanh", 1e-3), curve("kind_silu", 2e-3)
    newer = curve("kind_tanh", 3e-3)
    found = own_calibrations([run(first, second, day="2026-11-01"), run(newer), run()])
    assert set(found) == {H200.id}
    assert set(found[H200.id].curves) == {newer, second}
    assert found[H200.id].source == "curves measured here on H200 SXM5 141GB (2026-11-30)"
    assert own_calibrations([run(first, name="Unheard of")]) == {}


def test_what_was_measured_here_counts_and_the_rest_stays() -> None:
    shipped = rates_of(H200)
    points = [
        curve("kernel_none", 1e-6),
        *(curve("kind_tanh", 1e-6 + 1e-2 * n, shape=(n,), bytes=n * 2**20) for n in (1, 4)),
    ]
    found = rates_of(calibrated(H200, own(*points)))
    tanh, silu = stream_number("tanh", "bf16"), stream_number("silu", "bf16")
    assert found.stream_s(tanh, 2.0**21) == pytest.approx(2e-2)
    assert found.warm_stream_s(tanh, 2.0**21) == pytest.approx(2e-2)
    assert found.stream_s(silu, 2.0**21) == shipped.stream_s(silu, 2.0**21)
    assert found.gap_s == 1e-6
    assert found.products == shipped.products
    assert found.host == shipped.host


def test_a_host_that_starts_kernels_twice_as_slowly_takes_twice_as_long() -> None:
    # The shipped one took 6.96 us, the median of three runs.
    found = rates_of(calibrated(H200, own(curve("launch_elementwise", 2 * 6.9553025e-6))))
    usual = rates_of(H200).host.paces
    assert found.host.paces == pytest.approx((2 * usual[0], 2 * usual[1]))


def test_a_host_whose_pace_was_measured_goes_at_it() -> None:
    shipped = rates_of(H200).host
    points = (
        curve("launch_elementwise", 1.0),
        curve("launch_module_forward", 3 * shipped.module_s[0]),
        curve("launch_module_backward", 2 * shipped.module_s[1]),
    )
    assert rates_of(calibrated(H200, own(*points))).host.paces == pytest.approx((3.0, 2.0))


def test_a_calibration_of_another_gpu_says_nothing() -> None:
    found = rates_of(calibrated(H100, own(curve("kernel_none", 1.0))))
    assert (found.source, found.gap_s) == (rates_of(H100).source, rates_of(H100).gap_s)


def test_a_plan_says_whose_rates_it_is_timed_at() -> None:
    slow = own(
        *(
            curve(f"matmul_{layout}", 1.0, shape=(4096, 4096, 4096), flops=2.0 * 4096**3)
            for layout in ("nt", "nn", "tn")
        )
    )
    plan = (LLAMA, TrainingWorkload(), Parallelism(zero_stage=0, world_size=1), H200)
    shipped, here = (
        training_throughput(*plan),
        training_throughput(*plan[:3], calibrated(H200, slow)),
    )
    assert here.step_time_s > 10 * shipped.step_time_s
    assert "NVIDIA H200 (torch" in shipped.source
    assert here.source == slow.source


def test_a_prediction_notes_the_calibration_made_here() -> None:
    plan = parse_plan(
        {
            "job": "train",
            "model": {"preset": "openai-community/gpt2"},
            "workload": {"sequence_length": 64},
            "parallelism": {"world_size": 1},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )
    here = own(curve("kernel_none", 2e-6))
    mine = replace(plan, hardware=calibrated(plan.hardware, here))
    notes = predict(mine, segment_share=0.0).notes
    assert f"Step time: {here.source}." in notes


def test_everything_that_is_timed_goes_at_the_rates_measured_here() -> None:
    """A slow matrix product is in a sweep, a lever, the grid and a serving plan as it is in the plan."""
    slow = own(
        *(
            curve(f"matmul_{layout}", 1.0, shape=(4096, 4096, 4096), flops=2.0 * 4096**3)
            for layout in ("nt", "nn", "tn")
        )
    )
    document = {
        "model": {"preset": "openai-community/gpt2"},
        "workload": {"sequence_length": 512},
        "parallelism": {"world_size": 2},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    plan = parse_plan(document)
    here = replace(plan, hardware=calibrated(plan.hardware, slow))
    step_s = predict(here, segment_share=0.0).throughput.step_time_s
    assert step_s > 10 * predict(plan, segment_share=0.0).throughput.step_time_s
    swept = sweep(here, axes_of(here, {}, Limits()))
    assert swept.record(0)["step_time_s"] == pytest.approx(step_s)
    lever = next(
        one
        for one in levers_of(here, predict(here), replay=False)
        if one.change.words == "checkpointing full"
    )
    assert lever.step_time_s > step_s
    table = grid(here, zero_stages=(here.parallelism.zero_stage,), world_sizes=(2,))
    assert next(iter(table.records()))["step_time_s"] == pytest.approx(step_s)
    served = parse_plan({**document, "job": "serve", "workload": {"context_length": 512}})
    mine = replace(served, hardware=calibrated(served.hardware, slow))
    assert predict(mine).throughput.source == slow.source
