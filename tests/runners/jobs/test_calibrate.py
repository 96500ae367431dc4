"""The job `calibrate` on the CPU: small sizes, the real collectives of two gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.calibration import Curve
from planner.errors import PlanError
from runners.jobs.calibrate import parse_calibration
from runners.jobs.calibrate_cases import local_cases
from runners.jobs.calibrate_host import DEPTHS, HostCase, host_cases, small_config
from runners.jobs.calibrate_kinds import kind_cases
from tests.runners import forks


def _run(out: Path, ranks: int, budget_s: float) -> tuple[int, dict[str, Any]]:
    spec = {
        "schema": 1,
        "kind": "calibrate",
        "world": "cpu",
        "calibration": {"world_size": ranks, "budget_s": budget_s},
    }
    out.mkdir()
    (out / "spec.json").write_text(json.dumps(spec))
    arguments = ["-m", "runners.jobs.calibrate", str(out / "spec.json"), str(out)]
    codes = forks.run_ranks(arguments, ranks, out / "log", timeout_s=300)
    return max(codes), json.loads((out / "result.json").read_text())


def test_two_ranks_measure_collectives_and_one_the_rest(tmp_path: Path) -> None:
    code, result = _run(tmp_path / "run", ranks=2, budget_s=200.0)
    assert (code, result["outcome"]) == (0, "done"), result["error"]
    curves = [Curve.from_dict(curve) for curve in result["measured"]["curves"]]
    assert all(curve.time_s > 0 and curve.n >= 5 for curve in curves)
    collectives = [curve for curve in curves if curve.operation == "all_gather"]
    assert [(c.bytes, c.shape) for c in collectives] == [(8192, (4096, 2)), (65536, (32768, 2))]
    operations = {curve.operation for curve in curves}
    assert {"all_reduce", "reduce_scatter", "matmul_nt", "attention_backward_sdpa"} < operations
    assert {"copy", "add", "layer_norm", "adamw", "launch_matmul", "synchronize"} < operations
    assert {"launch_module_forward", "launch_module_backward"} < operations
    assert result["measured"]["left_out"] == []
    events = (tmp_path / "run" / "events-rank0.jsonl").read_text().splitlines()
    phases = [json.loads(line).get("name") for line in events]
    assert [name for name in dict.fromkeys(phases) if name] == [
        *(
            "collectives",
            "launch",
            "memory",
            "matmul",
            "kinds",
            "offload",
            "attention",
            "host",
        )
    ]
    [host] = result["measured"]["host"]
    assert (host["family"], host["engine"], host["stage"]) == ("llama", "peakmark", 0)
    shallow, deep = host["depths"]
    assert (shallow["layers"], deep["layers"]) == DEPTHS
    # Times of a busy machine: that the deeper model takes longer is not sure in one step.
    times = ("forward_s", "backward_s")
    assert all(found[time] > 0 for found in (shallow, deep) for time in times)
    paces = ("launch_us", "forward_us", "backward_us")
    assert [tuple(found["host_pace"]) for found in (shallow, deep)] == [paces, paces]


def test_points_say_what_they_move_and_compute() -> None:
    cases = {
        (c.operation, c.shape): c
        for c in local_cases(torch.device("cpu"))
        if c.dtype == "bf16" or c.operation == "adamw"
    }
    product = cases["matmul_nt", (128, 128, 128)]
    assert (product.flops, product.bytes) == (2 * 128**3, 2 * 3 * 128**2)
    # Per element the gradient in bf16 and fp32, AdamW's seven passes in fp32, the value in fp32 and bf16.
    assert cases["host_update", (65536, 1)].bytes == (2 + 4 + 28 + 4 + 2) * 65536
    # 64 KiB of bf16 read and written; AdamW reads four fp32 tensors and writes three.
    assert cases["copy", (32768,)].bytes == 2 * 65536
    assert cases["adamw", (16384,)].bytes == 7 * 65536
    # Q and O of 128 tokens x 64, K and V of 128 x 16; 4 B H S S D / 2 flops.
    forward = cases["attention_forward_sdpa", (2, 4, 1, 64, 16)]
    assert forward.bytes == 2 * (2 * 128 * 64 + 2 * 128 * 16)
    assert forward.flops == 4 * 2 * 4 * 64 * 64 * 16 / 2
    assert cases["attention_backward_sdpa", (2, 4, 1, 64, 16)].flops == 2.5 * forward.flops


def test_a_family_is_made_small_by_its_own_names() -> None:
    assert small_config("gpt2", 3) == {
        "model_type": "gpt2",
        "vocab_size": 1024,
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 1024,
    }
    config = small_config("qwen2", 8)
    # Two key-value heads for fourteen query heads stay two, for four.
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["num_hidden_layers"], config["hidden_size"]) == (8, 256)


@pytest.mark.parametrize("case", host_cases(is_cuda=True), ids=repr)
def test_every_case_of_the_host_is_a_plan(case: HostCase) -> None:
    for layers in DEPTHS:
        plan = case.plan(layers)
        assert (plan.model.family, plan.model.num_layers) == (case.family, layers)
        assert plan.parallelism.world_size == (8 if case.stage else 1)


def test_kinds_of_operations_count_what_they_move() -> None:
    cases = {(c.operation, c.dtype): c for c in kind_cases(is_cuda=False)}
    # 65,536 numbers: 2 bytes read and 4 written; read twice and written once in bf16.
    assert cases["kind_cast_up", "bf16"].bytes == 6 * 65536
    assert cases["kind_binary_warm", "bf16"].bytes == 6 * 65536


def test_nothing_is_begun_after_the_budget(tmp_path: Path) -> None:
    code, result = _run(tmp_path / "run", ranks=1, budget_s=1e-9)
    assert (code, result["outcome"]) == (0, "done")
    assert result["measured"]["curves"] == result["measured"]["host"] == []
    assert len(result["measured"]["left_out"]) == len(local_cases(torch.device("cpu")))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "calibration"),
        ({"world_size": 0, "budget_s": 1}, "calibration.world_size"),
        ({"world_size": 2, "budget_s": -1}, "calibration.budget_s"),
        ({"world_size": 2, "budget_s": 1, "colour": 3}, "colour"),
    ],
)
def test_a_bad_spec_names_its_field(given: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        parse_calibration(given)
