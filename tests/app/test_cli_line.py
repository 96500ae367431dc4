"""The command under the answer says the same plan."""

from __future__ import annotations

from app.cli_line import cli_line, is_plain_preset
from planner.plan import default_plan, parse_plan


def test_the_default_plan_is_written_with_every_choice() -> None:
    assert cli_line(default_plan().to_dict()) == (
        "peakmark plan --model meta-llama/Llama-3.1-8B --gpu h200-sxm5-141gb --seq 4096 "
        "--micro-batch 1 --grad-accumulation 1 --optimizer adamw_fused --precision mixed "
        "--attention sdpa --checkpointing none --engine peakmark --zero 3 --gpus 8"
    )


def test_serving_is_written_with_its_replicas() -> None:
    document = default_plan().to_dict()
    document["job"] = "serve"
    document["workload"] = {"context_length": 1024, "sequences": 3}
    document["parallelism"]["world_size"] = 4
    assert cli_line(parse_plan(document).to_dict()) == (
        "peakmark plan --model meta-llama/Llama-3.1-8B --gpu h200-sxm5-141gb --serve "
        "--context 1024 --sequences 3 --weights-dtype bf16 --kv-dtype bf16 --gpus 4"
    )


def test_an_edited_model_is_given_as_a_file() -> None:
    document = default_plan().to_dict()
    document["model"]["overrides"] = {"num_hidden_layers": 2}
    plan = parse_plan(document).to_dict()
    assert not is_plain_preset(plan)
    assert "--config config.json" in cli_line(plan)


def test_rare_choices_are_named_where_they_are_chosen() -> None:
    document = default_plan().to_dict()
    document["workload"] |= {"lora_rank": 8, "packed": True, "sync_each_micro_batch": False}
    document["parallelism"] |= {"tensor_parallel": 2, "sequence_parallel": True}
    assert cli_line(document).endswith(
        "--gpus 8 --no-sync-each-micro-batch --lora-rank 8 --packed --tensor-parallel 2 "
        "--sequence-parallel"
    )


def test_a_custom_gpu_and_a_usable_share_are_in_the_command() -> None:
    document = default_plan().to_dict()
    document["job"] = "serve"
    document["workload"] = {"context_length": 1024, "utilization": 0.5}
    document["hardware"] = {
        "custom": {
            "name": "custom GPU",
            "visible_bytes": 24 * 2**30,
            "mem_bandwidth_bytes_s": 10**12,
            "peak_dense_flop_s": {"bf16": 1.5 * 10**14},
            "interconnect_bytes_s": 10**10,
        }
    }
    line = cli_line(parse_plan(document).to_dict())
    assert "--gpu custom --gpu-gib 24 --gpu-tb-s 1 --gpu-tflop-s 150 --gpu-link-gb-s 10" in line
    assert line.endswith("--gpus 8 --utilization 0.5")
