"""Runs beside the same plan with one choice made otherwise: offloading, our AdamW kernel."""

from __future__ import annotations

from typing import Any

import pytest

from planner.beside_runs import kernel_lines, offloaded_lines
from planner.zero import work_of

GIB = 2**30


def spec(world: str = "solo", ranks: int = 8, **workload: Any) -> dict[str, Any]:
    return {
        "kind": "train_step",
        "world": world,
        "plan": {
            "schema": 1,
            "job": "train",
            "model": {"preset": "Qwen/Qwen2.5-0.5B"},
            "workload": {"sequence_length": 1024, "precision": "mixed", **workload},
            "parallelism": {"engine": "peakmark", "zero_stage": 3, "world_size": ranks},
            "hardware": {"preset": "h200-sxm5-141gb"},
        },
    }


def measured(gib: float, step_s: float) -> dict[str, Any]:
    state = {"host_bytes": 3 * GIB}
    return {"allocated_bytes": round(gib * GIB), "step_time_s": step_s, "state": state}


OFFLOADED = spec(offload_optimizer=True)


def test_a_run_stands_beside_the_newest_of_its_plan_that_kept_the_optimizer() -> None:
    seen = [
        (spec(), measured(7, 0.2)),
        (spec(), measured(6, 0.1)),
        (spec(world="nccl"), measured(9, 0.9)),
        (spec(ranks=2), measured(9, 0.9)),
        (OFFLOADED, measured(4, 0.25)),
    ]
    [line] = offloaded_lines(seen)
    assert line["plan"].startswith("Qwen2.5-0.5B, 1 x 1,024 tokens, mixed")
    assert "offload" not in line["plan"]
    assert (line["stage"], line["N"]) == ("3", "8")
    assert (line["here"], line["kept"], line["host"]) == ("4.00", "6.00", "3.00")
    # Of before runs said their host's pace: too many threads stepped it.
    assert (line["step ms"], line["kept: step ms"]) == ("250.0*", "100.0")
    paced = {**measured(4, 0.25), "host_pace": [{}]}
    assert offloaded_lines([(OFFLOADED, paced)])[0]["step ms"] == "250.0"
    # 12 bytes of an eighth of 494 million parameters are 0.69 GiB, beside the buffers.
    assert float(line["predicted"]) == pytest.approx(1.0, abs=0.3)


def test_other_work_is_left_out_and_a_plan_never_run_otherwise_says_so() -> None:
    seen = [(OFFLOADED, measured(4, 0.25))]
    own = work_of(spec()["plan"])[0]
    assert [line["kept"] for line in offloaded_lines(seen, own)] == ["-"]
    assert offloaded_lines(seen, work_of(spec(micro_batch=2)["plan"])[0]) == []


def test_our_kernel_stands_beside_torchs_and_the_ideal() -> None:
    torchs = {**measured(14, 0.3), "optimizer_time_s": 0.05}
    ours = {**measured(13, 0.28), "optimizer_time_s": 0.03}
    seen = [
        (spec(optimizer="adamw_triton", ranks=1), ours),
        (spec(optimizer="adamw_foreach", ranks=1), measured(20, 1)),
        # The default, so it need not be written.
        (spec(ranks=1), torchs),
    ]
    [line] = kernel_lines(seen)
    assert line["plan"] == "Qwen2.5-0.5B, 1 x 1,024 tokens, mixed, sdpa, checkpointing none"
    assert (line["peak"], line["torch's peak"]) == ("13.00", "14.00")
    assert (line["optimizer ms"], line["torch's ms"]) == ("30.0", "50.0")
    assert (line["step ms"], line["torch's step ms"]) == ("280.0", "300.0")
    # fp32 values and two moments of 494 million parameters are 5.5 GiB.
    assert float(line["ideal"]) > 5.5
