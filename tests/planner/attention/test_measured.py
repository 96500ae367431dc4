"""A plan's attention, and what was measured of it: shapes matched field by field."""

from __future__ import annotations

from typing import Any

import pytest

from planner.attention.measured import best_of, seen_in_benches, seen_in_row
from planner.attention.of_plan import problem_of_plan
from planner.attention.problem import AttentionProblem, Variant
from planner.errors import PlanError
from planner.plan import parse_plan

PLAN: dict[str, Any] = {
    "schema": 1,
    "job": "train",
    "model": {"preset": "llama-3.1-8b"},
    "workload": {"sequence_length": 8192, "micro_batch": 2},
    "parallelism": {},
    "hardware": {"preset": "h200"},
}
SHAPE = {
    "batch": 2,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "sequence_length": 8192,
    "causal": True,
}


def test_a_plan_says_the_shape_and_a_change_overrules_it() -> None:
    assert problem_of_plan(parse_plan(PLAN)) == AttentionProblem(**SHAPE)
    changed = problem_of_plan(parse_plan(PLAN), {"causal": False, "sequence_length": 2048})
    assert (changed.causal, changed.sequence_length, changed.window) == (False, 2048, 512)
    exact = {**PLAN, "workload": {"precision": "fp32"}}
    assert problem_of_plan(parse_plan(exact)).dtype == "fp32"
    windowed = {**PLAN, "model": {"preset": "mistralai/Mistral-7B-v0.1"}}
    assert problem_of_plan(parse_plan(windowed)).window == 4096
    serving = {**PLAN, "job": "serve", "workload": {"context_length": 4096, "sequences": 3}}
    found = problem_of_plan(parse_plan(serving))
    assert (found.batch, found.sequence_length, found.dtype) == (3, 4096, "bf16")
    with pytest.raises(PlanError, match=r"attention\.sequence_length is 'x'"):
        problem_of_plan(parse_plan(PLAN), {"sequence_length": "x"})


def row(**kernels: Any) -> list[Any]:
    spec = {"kind": "attention", "world": "nccl", "attention": {**SHAPE, "window": 512}}
    measured = {"kernels": kernels, "card": {"copy_bytes_s": 4e12, "product_flop_s": 7e14}}
    environment = {"gpu": {"name": "NVIDIA H200"}}
    return seen_in_row(spec, measured, environment, row="a", here=True)


DONE = {
    "outcome": "done",
    "forward": {"median_s": 1e-3},
    "backward": {"median_s": 3e-3},
    "backend": {"forward": "hopper", "backward": "triton"},
    "forward_peak_bytes": 10,
    "backward_peak_requested_bytes": 30,
    "error": {"output": {"relative": 1e-3, "max_abs": 1.0}},
}


def test_a_run_of_the_job_is_read_variant_by_variant() -> None:
    out = {"outcome": "oom_device", "stage": "backward", "forward": {"median_s": 2.0}}
    skipped = {"outcome": "skipped", "reason": "no GPU"}
    triton, eager, window = row(
        triton=DONE,
        eager=out,
        linear=skipped,
        window={**DONE, "apart_from_exact": {"mean_of_rows": 0.5}},
    )
    assert (triton.forward_s, triton.backward_s, triton.error) == (1e-3, 3e-3, 1e-3)
    assert (triton.forward_backend, triton.backward_backend) == ("hopper", "triton")
    assert (triton.forward_peak_bytes, triton.backward_peak_requested_bytes) == (10, 30)
    assert (triton.gpu, triton.copy_bytes_s) == ("NVIDIA H200", 4e12)
    assert (eager.outcome, eager.stage, eager.backward_s) == ("oom_device", "backward", None)
    assert window.apart_from_exact == 0.5
    # A window of 512 is another window; for ours it does not matter.
    problem = AttentionProblem(**SHAPE)
    assert triton.is_of(problem) and not window.is_of(problem)
    longer = AttentionProblem(**{**SHAPE, "sequence_length": 4096, "window": 512})
    assert not window.is_of(longer) and window.is_of(longer, any_length=True)
    other = AttentionProblem(**{**SHAPE, "batch": 1})
    assert not triton.is_of(other) and triton.is_of(other, any_batch=True)
    assert seen_in_row({"attention": {"old": 1}}, {}, {}, row=None, here=False) == []


def test_benchmark_rows_hold_both_directions_of_one_problem() -> None:
    bench = {
        "operation": "attention",
        "device": "NVIDIA H200",
        "head_dim": 128,
        "heads": 32,
        "kv_heads": 8,
        "causal": True,
        "seq": 8192,
        "backend": "hopper",
        "peer": "cudnn",
        "ours_s": 1.0,
        "peer_s": 2.0,
    }
    masked = {
        "operation": "attention_masks",
        "device": "NVIDIA H200",
        "mask": "window 4k",
        "head_dim": 128,
        "heads": 16,
        "seq": 32768,
        "direction": "forward",
        "ours_s": 7.0,
    }
    found = seen_in_benches(
        [
            {**bench, "direction": "forward"},
            {**bench, "direction": "backward", "ours_s": 3.0},
            {**bench, "direction": "forward", "error": "RuntimeError"},
            masked,
        ]
    )
    ours, torchs, window = found
    assert (ours.variant, ours.forward_s, ours.backward_s) == (Variant.TRITON, 1.0, 3.0)
    assert (torchs.variant, torchs.forward_s, torchs.forward_backend) == (
        Variant.SDPA,
        2.0,
        "cudnn",
    )
    # 32,768 tokens in rows of 8,192.
    assert ours.is_of(AttentionProblem(**{**SHAPE, "batch": 4}))
    assert (window.problem.batch, window.problem.kv_heads, window.problem.window) == (1, 16, 4096)


def test_a_run_here_counts_before_one_recorded_elsewhere() -> None:
    here = row(triton=DONE)[0]
    spec = {"kind": "attention", "world": "nccl", "attention": SHAPE}
    there = seen_in_row(spec, {"kernels": {"triton": DONE, "sdpa": DONE}}, {}, row="b", here=False)
    best = best_of([here, *there])
    assert best[Variant.TRITON] is here and best[Variant.SDPA].row == "b"
