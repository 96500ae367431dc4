"""What is told of trainings that were saved, continued and compared."""

from __future__ import annotations

import json
from pathlib import Path

from planner.saved_runs import alike_lines, alike_place, saved_lines

RECORDED = Path(__file__).resolve().parents[2] / "recorded"
SPEC = {
    "world": "nccl",
    "plan": {
        "model": {"preset": "Qwen/Qwen2.5-0.5B"},
        "parallelism": {"engine": "peakmark", "zero_stage": 1, "world_size": 2},
    },
}


def test_only_runs_that_saved_or_loaded_have_a_line() -> None:
    kept = {"step": 6, "world_size": 1, "zero_stage": 3, "bytes": 3 * 2**29, "time_s": 4.06}
    seen = {"loaded": kept, "losses": [8.86228, None, 7.9, 1.0]}
    assert saved_lines([(SPEC, {}), (SPEC, seen)]) == [
        {
            "model": "Qwen2.5-0.5B",
            "world": "nccl",
            "ranks": "2",
            "stage": "1",
            "went on from": "step 6 of 1 rank at stage 3, 1.50 GiB in 4.1 s",
            "saved": "-",
            "losses of rank 0": "8.862, -, 7.900",
        }
    ]


def test_a_training_held_to_itself_has_no_line() -> None:
    about = {"model": "llama", "precision": "fp32", "checkpointing": True, "lora": False}
    own = {"check": "alike", "engine": "peakmark", **about, "steps": 10}
    figures = {"losses_equal": True, "gradients_worst": 0.25, "parameters_equal": False}
    lines = alike_lines([{**own, "stage": stage, **figures} for stage in (0, 3)])
    assert [list(line.values()) for line in lines] == [
        [
            *("llama, fp32, checkpointing", "peakmark, stage 3", "peakmark, stage 0", "10"),
            *("equal", "differ", "differ"),
        ]
    ]


def test_two_gpus_trained_alike_at_every_stage_and_one_went_on() -> None:
    path = RECORDED / "equality" / "h200-two-gpus.jsonl"
    _, *compared = map(json.loads, path.read_text().splitlines())
    alike = {(one["engine"], one["stage"]) for one in compared if one["check"] == "alike"}
    assert alike == {("peakmark", stage) for stage in range(4)} | {("ddp", 0)}
    assert sum(one["check"] == "loaded" and one["ranks"] == 1 for one in compared) == 3
    assert all(one["losses_equal"] and one["parameters_equal"] for one in compared)


def test_an_engine_that_reduces_in_fp32_is_held_to_ours_reducing_so() -> None:
    about = {"check": "alike", "model": "gpt2", "precision": "mixed", "checkpointing": False}
    figures = {"losses_equal": True, "gradients_worst": 0.0, "parameters_equal": True}
    rows = [
        {**about, **figures, "lora": False, "steps": 10, "stage": 2, **engine}
        for engine in (
            {"engine": "fsdp2", "reduce_dtype": "auto"},
            {"engine": "peakmark", "reduce_dtype": "fp32"},
            {"engine": "deepspeed", "reduce_dtype": "auto"},
        )
    ]
    assert [line["compared with"] for line in alike_lines(rows)] == [
        "peakmark, stage 0, gradients reduced in fp32",
        "peakmark, stage 0, gradients reduced in fp32",
        "peakmark, stage 0",
    ]


def test_where_trainings_were_compared_is_said() -> None:
    where = {"ranks": 2, "torch": "2.11.0", "gpu": "H200", "world": "nccl", "nccl": "2.28.9"}
    assert alike_place(where) == ("NCCL", "2 x H200, torch 2.11.0, NCCL 2.28.9: 2 ranks")
    cpu = {"ranks": 2, "torch": "2.13.0", "gpu": None, "world": "cpu", "deepspeed": "0.19.8"}
    assert alike_place(cpu)[1] == "CPUs, torch 2.13.0, gloo, DeepSpeed 0.19.8: 2 ranks"


def test_every_engine_has_the_same_numbers_on_cpus() -> None:
    path = RECORDED / "equality" / "cpu-engines.jsonl"
    _, *compared = map(json.loads, path.read_text().splitlines())
    alike = {(one["engine"], one["stage"]) for one in compared}
    assert {("deepspeed", stage) for stage in (1, 2, 3)} | {("fsdp2", 2), ("fsdp2", 3)} <= alike
    assert all(one["losses_equal"] and one["parameters_equal"] for one in compared)
    assert all(one["gradients_worst"] == 0 for one in compared)
