"""The job train_step on the CPU: real processes, real models, every engine and world that fits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.runners import forks

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# 64*32 + 2*(2*32*32 + 2*16*32 + 3*48*32 + 2*32) + 32 + 64*32
PARAMETERS = 2048 + 2 * 7744 + 32 + 2048


def _spec(*, world: str = "cpu", rank: int = 0, device: str | None = None, **plan: Any) -> dict:
    workload = {"sequence_length": 16, "precision": "fp32"} | plan.get("workload", {})
    parallelism = {"zero_stage": 3, "world_size": 1} | plan.get("parallelism", {})
    return {
        "schema": 1,
        "kind": "train_step",
        "world": world,
        "rank": rank,
        "device": device,
        "warmup": 2,
        "steps": 3,
        "plan": {
            "schema": 1,
            "job": "train",
            "model": {"config": CONFIG, "name": "tiny"},
            "workload": workload,
            "parallelism": parallelism,
            "hardware": {"preset": "h200-sxm5-141gb"},
        },
    }


def _run(spec: dict, out: Path, ranks: int = 1) -> tuple[int, dict[str, Any]]:
    out.mkdir()
    (out / "spec.json").write_text(json.dumps(spec))
    arguments = ["-m", "runners.jobs.train_step", str(out / "spec.json"), str(out)]
    codes = forks.run_ranks(arguments, ranks, out / "log", timeout_s=200)
    return max(codes), json.loads((out / "result.json").read_text())


def test_one_rank_measures_times_losses_and_state(tmp_path: Path) -> None:
    spec = _spec(workload={"grad_accumulation": 2, "checkpointing": "full"})
    code, result = _run(spec, tmp_path / "run")
    measured = result["measured"]
    assert (code, result["outcome"]) == (0, "done")
    assert measured["state"] == {
        "parameter_bytes": 4 * PARAMETERS,
        "gradient_bytes": 4 * PARAMETERS,
        "optimizer_bytes": 8 * PARAMETERS + 4 * 4,
    }
    assert len(measured["losses"]) == len(measured["step_times_s"]) == 3
    assert measured["losses"][0] == pytest.approx(math.log(64), abs=0.2)
    assert measured["losses"][2] < measured["losses"][0]
    assert measured["allocated_bytes"] is None
    assert measured["attention_backend"] == "sdpa:flash"
    assert measured["attention_call"]["is_causal"] is True
    phases = ("forward_time_s", "backward_time_s", "optimizer_time_s")
    assert 0 < sum(measured[name] for name in phases) <= 1.5 * measured["step_time_s"]
    assert measured["tokens_per_s"] == pytest.approx(32 / measured["step_time_s"])


def test_a_chunked_loss_starts_where_hugging_face_s_does(tmp_path: Path) -> None:
    chosen = {"loss": "chunked", "grad_accumulation": 2, "sync_each_micro_batch": False}
    code, result = _run(_spec(workload=chosen), tmp_path / "run")
    measured = result["measured"]
    assert (code, result["outcome"]) == (0, "done")
    assert measured["losses"][0] == pytest.approx(math.log(64), abs=0.2)
    assert measured["losses"][2] < measured["losses"][0]


def test_adapters_train_in_the_job(tmp_path: Path) -> None:
    chosen = {"lora_rank": 4, "lora_targets": "qv", "precision": "bf16", "checkpointing": "full"}
    code, result = _run(_spec(workload=chosen), tmp_path / "run")
    assert (code, result["outcome"]) == (0, "done")
    # Two layers with A and B of q_proj (32 to 32) and of v_proj (32 to 16).
    adapters = 2 * 4 * (32 + 32 + 32 + 16)
    state = result["measured"]["state"]
    assert state["parameter_bytes"] == 2 * (PARAMETERS + adapters)
    assert state["gradient_bytes"] == 2 * adapters


def test_a_loss_whose_kernel_cannot_run_here_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, result = _run(_spec(workload={"loss": "fused_linear"}), tmp_path / "run")
    assert (code, result["outcome"]) == (1, "failed")
    assert "hidden is on cpu; it must be on a CUDA device" in result["error"]["message"]


@pytest.mark.parametrize("engine", ["peakmark", "fsdp2"])
def test_two_ranks_report_both(tmp_path: Path, engine: str) -> None:
    spec = _spec(parallelism={"world_size": 2, "engine": engine})
    code, result = _run(spec, tmp_path / "run", ranks=2)
    measured = result["measured"]
    assert (code, result["outcome"]) == (0, "done")
    assert [rank["rank"] for rank in measured["per_rank"]] == [0, 1]
    # Every group's size is even: each rank holds exactly half.
    assert measured["state"]["parameter_bytes"] == 2 * PARAMETERS
    assert measured["communication"]["reduce_scatter"]["bytes"] == 4 * PARAMETERS
    events = [json.loads(x) for x in (tmp_path / "run/events-rank1.jsonl").open()]
    names = [event.get("name") for event in events if event["event"] == "phase"]
    before = ["build", "init", "first_step", "warmup"]
    assert names == [*before, *["step"] * 3, "collect", "host_pace"]
    # Each rank's own host.
    assert all(pace["forward_us"] > 0 for pace in measured["host_pace"])
    assert len(measured["host_pace"]) == 2


@pytest.mark.parametrize("engine", ["peakmark", "fsdp2"])
def test_one_rank_of_many_reports_its_share_and_no_losses(tmp_path: Path, engine: str) -> None:
    spec = _spec(
        world="solo", rank=7, device="cpu", parallelism={"world_size": 8, "engine": engine}
    )
    code, result = _run(spec, tmp_path / "run")
    measured = result["measured"]
    assert (code, result["outcome"]) == (0, "done")
    assert measured["losses"] is None
    assert "solo" in measured["losses_reason"]
    # Every tensor's first dimension is a multiple of 8: no padding in either engine.
    assert measured["state"]["parameter_bytes"] == 4 * PARAMETERS // 8


def test_a_world_size_that_was_not_launched_is_one_sentence(tmp_path: Path) -> None:
    code, result = _run(_spec(parallelism={"world_size": 4}), tmp_path / "run")
    assert (code, result["outcome"]) == (1, "failed")
    assert result["error"]["message"] == (
        "the plan's world size is 4, but 1 processes were started for world cpu"
    )
