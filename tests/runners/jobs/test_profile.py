"""The profile of a step: spans out of a trace, and real steps and requests on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import PlanError
from planner.time_parts import Part
from planner.time_shares import ceilings, profile_cells, verdict_sentence, whole_s
from runners.contract import JobKind, JobSpec, World
from runners.jobs.data_source import open_source
from runners.jobs.harness import EventLog, JobSession
from runners.jobs.profile import measure_profile
from runners.jobs.profile_trace import cpu_work, gpu_work
from runners.worlds import Launch

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
PLAN = {
    "schema": 1,
    "job": "train",
    "model": {"config": CONFIG, "name": "tiny"},
    "hardware": {"preset": "h200-sxm5-141gb"},
    "workload": {"micro_batch": 2, "sequence_length": 32, "grad_accumulation": 2},
    "parallelism": {"world_size": 1, "engine": "peakmark", "zero_stage": 2},
}
DECODE = {
    "model": {"config": CONFIG, "name": "tiny"},
    "batch": 2,
    "context": 20,
    "new_tokens": 4,
    "dtype": "fp32",
    "page_size": 16,
    "attention": "torch",
    "peers": [],
}


def event(category: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": length, "tid": 1, "args": args}


def spans(work: list[Any]) -> list[tuple[str, str | None, Part, float, float]]:
    return [
        (one.name, one.phase, one.span.part, one.span.start_s * 1e6, one.span.end_s * 1e6)
        for one in work
    ]


def test_an_operation_s_own_time_is_without_what_is_within_it() -> None:
    events = [
        event("user_annotation", "peakmark.forward", 0, 100),
        event("cpu_op", "aten::linear", 10, 50),
        event("cpu_op", "aten::t", 12, 8),
        event("cpu_op", "aten::addmm", 25, 30),
        event("cpu_op", "aten::copy_", 26, 4),
        event("cpu_op", "aten::mul", 200, 10),
    ]
    found = spans(cpu_work(events))
    assert found == [
        ("aten::linear", "forward", Part.MATMUL, pytest.approx(10), pytest.approx(12)),
        ("aten::linear", "forward", Part.MATMUL, pytest.approx(20), pytest.approx(25)),
        ("aten::addmm", "forward", Part.MATMUL, pytest.approx(25), pytest.approx(26)),
        ("aten::copy_", "forward", Part.COPIES, pytest.approx(26), pytest.approx(30)),
        ("aten::addmm", "forward", Part.MATMUL, pytest.approx(30), pytest.approx(55)),
        ("aten::linear", "forward", Part.MATMUL, pytest.approx(55), pytest.approx(60)),
        ("aten::mul", None, Part.ELEMENTWISE, pytest.approx(200), pytest.approx(210)),
    ]
    # The view is the host's; an operation in pieces is one call.
    assert [one.span.calls for one in cpu_work(events)] == [1, 0, 1, 1, 0, 0, 1]


def test_a_kernel_takes_phase_and_operation_of_its_launch() -> None:
    events = [
        event("user_annotation", "peakmark.backward", 0, 50),
        event("user_annotation", "peakmark.optimizer", 50, 50),
        event("cpu_op", "peakmark::attention_backward", 10, 20, **{"External id": 7}),
        event("cuda_driver", "cuLaunchKernelEx", 12, 3, correlation=1),
        event("cpu_op", "aten::mul", 60, 20, **{"External id": 8}),
        event("cuda_runtime", "cudaLaunchKernel", 62, 3, correlation=2),
        event("kernel", "backward_kernel", 500, 100, correlation=1, **{"External id": 7}),
        event("kernel", "void at::native::vectorized_elementwise_kernel<4>", 600, 20,
              correlation=2, **{"External id": 8}),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 700, 5, correlation=9),
        event("gpu_user_annotation", "peakmark.backward", 500, 120),
    ]  # fmt: skip
    assert [(name[:12], phase, part) for name, phase, part, _, _ in spans(gpu_work(events))] == [
        ("backward_ker", "backward", Part.ATTENTION),
        ("void at::nat", "optimizer", Part.OPTIMIZER),
        ("Memcpy HtoD ", None, Part.COPIES),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of 50 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{index}": index for index in range(50)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    return tmp_path


def profiled(tmp_path: Path, **parts: Any) -> dict[str, Any]:
    spec = JobSpec(kind=JobKind.PROFILE, world=World.CPU, steps=2, **parts)
    out = tmp_path / "out"
    out.mkdir()
    session = JobSession(spec, Launch(), torch.device("cpu"), EventLog(out, 0))
    measure_profile(session)
    return session.measured


def test_a_training_step_is_split_and_the_parts_add_up(tmp_path: Path) -> None:
    measured = profiled(tmp_path, plan=PLAN)
    assert (measured["clock"], measured["work"]) == ("cpu", "training")
    assert {"attention", "matmul", "elementwise", "optimizer"} <= set(measured["parts"])
    assert {"forward", "backward", "optimizer"} <= set(measured["phases"])
    assert set(measured["phases"]["optimizer"]) <= {"optimizer", "communication"}
    alone_s = sum(one.alone_s for one in ceilings(measured))
    assert alone_s + measured["shared_s"] == pytest.approx(whole_s(measured))
    assert measured["base_s"] == measured["traced_time_s"]
    # Two micro-batches through two layers.
    attended = [row for row in measured["kernels"] if row[0].endswith("flash_attention_for_cpu")]
    assert [row[1:3] for row in attended] == [["attention", 4]]
    assert measured["step_time_statistics"]["n"] == 2
    assert "Changing attention" in verdict_sentence(measured)
    assert len(profile_cells(measured)) == len(ceilings(measured))


def test_requests_are_split_with_their_tokenizer(tmp_path: Path, folder: Path) -> None:
    measured = profiled(tmp_path, decode=DECODE, tokenizer=str(folder))
    assert set(measured["phases"]) >= {"prefill", "decode"}
    assert measured["phases"]["decode"]["attention"] > 0
    # 2 prompts of 20 words, of each of which 4 tokens are made text again.
    assert measured["data"]["tokens"] == 2 * (20 + 4)
    assert measured["data"]["time_s"] > 0
    found = {one.part: one for one in ceilings(measured)}
    assert found[Part.DATA].time_s == measured["data"]["time_s"]


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no tokenizer can be read there"):
        open_source(str(tmp_path / "nothing"))
