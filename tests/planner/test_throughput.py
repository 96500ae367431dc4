"""The roofline of a step and what follows from it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.hardware import Gpu, custom_gpu, resolve_gpu
from planner.presets import resolve_model
from planner.throughput import (
    CALIBRATED,
    Throughput,
    peak_flop_s,
    training_speed_grid,
    training_throughput,
)
from planner.workload import (
    Attention,
    Checkpointing,
    Parallelism,
    Precision,
    TrainingWorkload,
)

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
GPT2 = resolve_model("gpt2")
H200 = resolve_gpu("h200")


def speed(stage: int = 1, n: int = 8, gpu: Gpu = H200, **workload: Any) -> Throughput:
    """Return the speed of a Llama-3.1-8B step."""
    parallelism = Parallelism(zero_stage=stage, world_size=n)
    return training_throughput(LLAMA, TrainingWorkload(**workload), parallelism, gpu)


def test_the_step_is_the_sum_of_its_parts() -> None:
    result = speed(stage=3)
    assert result.step_time_s == pytest.approx(sum(op.time_s for op in result.operations))
    assert result.flops_per_step == pytest.approx(sum(op.flops for op in result.operations))
    assert result.tokens_per_s == pytest.approx(8 * 4096 / result.step_time_s)
    assert result.tokens_per_s_per_gpu * 8 == pytest.approx(result.tokens_per_s)
    assert result.phases_s is not None
    assert sum(result.phases_s.values()) == pytest.approx(result.step_time_s)
    assert result.ideal_s is not None and result.ideal_s < result.step_time_s
    assert "H200" in result.source


def test_the_gpu_waits_for_a_host_that_is_slower() -> None:
    small = TrainingWorkload(sequence_length=128)
    result = training_throughput(GPT2, small, Parallelism(zero_stage=0, world_size=1), H200)
    waiting = next(op for op in result.operations if op.name == "host.waiting")
    assert (result.bound, waiting.bound) == ("host", "host")
    assert result.host_s is not None and result.gpu_s is not None
    assert waiting.time_s == pytest.approx(result.host_s - result.gpu_s)
    assert result.step_time_s == pytest.approx(result.host_s)


def test_computing_again_is_seen_in_the_hardware_utilisation_alone() -> None:
    plain, again = speed(), speed(checkpointing=Checkpointing.FULL)
    assert plain.hfu is not None and again.hfu is not None
    recomputed = sum(op.flops for op in again.operations if op.name.startswith("recompute."))
    assert again.flops_per_step == pytest.approx(plain.flops_per_step + recomputed)
    # A forward of all layers: their products, 2 x 6.98e9 x 4096, and causal attention.
    layers = LLAMA.parameters - 2 * 128256 * 4096 - 65 * 4096
    attention = 32 * 4 * 4096 * (4096 * 4097 / 2)
    assert recomputed == pytest.approx(2 * layers * 4096 + attention)
    assert again.hfu > again.mfu


def test_mfu_is_useful_flops_over_peak() -> None:
    result = speed()
    tokens = 4096
    in_products = LLAMA.parameters - 128256 * 4096 - 65 * 4096
    useful = 6 * in_products * tokens + 6 * 4096 * 32 * tokens * (tokens + 1)
    assert result.mfu == pytest.approx(useful / (result.step_time_s * 989e12))
    # Recomputing costs time and earns nothing.
    assert speed(checkpointing=Checkpointing.FULL).mfu < result.mfu < 1


def test_what_bounds_the_step_moves_with_the_world() -> None:
    assert speed(n=8).bound == "compute"
    assert speed(stage=3, n=64).bound == "interconnect"
    assert "50 GB/s" in " ".join(speed(stage=3, n=64).notes)
    eager = replace(TrainingWorkload(), attention=Attention.EAGER, sequence_length=16384)
    parallelism = Parallelism(zero_stage=0, world_size=1)
    assert training_throughput(LLAMA, eager, parallelism, H200).bound == "hbm"


def test_a_card_without_bf16_uses_its_fp32_rate_and_says_so() -> None:
    rate, note = peak_flop_s(resolve_gpu("t4"), "bf16")
    assert rate == 8.1e12
    assert note == "T4 16GB has no bf16 rate: its fp32 rate is used."
    assert note in speed(gpu=resolve_gpu("t4")).notes


def test_a_custom_card_without_any_usable_rate_is_refused() -> None:
    gpu = custom_gpu(
        {
            "visible_bytes": 10**10,
            "mem_bandwidth_bytes_s": 1e12,
            "peak_dense_flop_s": {"fp8": 1e15},
        }
    )
    with pytest.raises(PlanError, match=r"peak_dense_flop_s\.bf16 is missing"):
        peak_flop_s(gpu, "bf16")


def test_the_json_form_is_plain_and_labelled() -> None:
    data = speed(stage=3, n=64, checkpointing=Checkpointing.FULL).to_dict()
    assert data["label"] == CALIBRATED == "from measured curves"
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))
    assert all(type(op["time_s"]) is float for op in data["operations"])
    assert {move["collective"] for move in data["communication"]} == {
        "all_gather",
        "reduce_scatter",
    }


SPLIT = {
    "tensor": Parallelism(zero_stage=1, world_size=2, tensor_parallel=2),
    "pipeline": Parallelism(zero_stage=1, world_size=2, pipeline_parallel=3),
    "context": Parallelism(zero_stage=1, world_size=2, context_parallel=4),
}


@pytest.mark.parametrize("name", SPLIT)
def test_a_grid_gives_what_single_split_plans_give(name: str) -> None:
    parallelism = SPLIT[name]
    workload = TrainingWorkload(grad_accumulation=4)
    grid = training_speed_grid(
        LLAMA,
        workload,
        parallelism,
        H200,
        zero_stages=(1,),
        world_sizes=(2,),
        micro_batches=(2,),
        sequence_lengths=(4096,),
    )
    single = training_throughput(LLAMA, replace(workload, micro_batch=2), parallelism, H200)
    assert grid["step_time_s"].item() == pytest.approx(single.step_time_s, rel=1e-12)
    assert grid["mfu"].item() == pytest.approx(single.mfu, rel=1e-12)


def test_two_tensor_parallel_gpus_share_every_product() -> None:
    alone, shared = (
        training_throughput(LLAMA, TrainingWorkload(), parallelism, H200)
        for parallelism in (Parallelism(zero_stage=1, world_size=2), SPLIT["tensor"])
    )
    assert shared.flops_per_step == pytest.approx(alone.flops_per_step / 2)
    assert shared.tokens_per_s_per_gpu == pytest.approx(shared.tokens_per_s / 4)


def test_context_parallel_gpus_share_the_causal_pairs_too() -> None:
    alone, shared = (
        training_throughput(LLAMA, TrainingWorkload(), parallelism, H200)
        for parallelism in (Parallelism(zero_stage=1, world_size=2), SPLIT["context"])
    )
    assert shared.flops_per_step == pytest.approx(alone.flops_per_step / 4)


def test_a_pipeline_waits_its_stages_less_one_over_its_micro_batches() -> None:
    result = training_throughput(
        LLAMA, TrainingWorkload(grad_accumulation=8), SPLIT["pipeline"], H200
    )
    bubble = next(op for op in result.operations if op.name == "pipeline.bubble")
    worked = sum(op.time_s for op in result.operations if op.name[:4] in ("forw", "back"))
    assert bubble.time_s == pytest.approx(worked * 2 / 8)
    # The last stage has the head and one layer less: 10 layers and the head are slowest.
    assert "forward.head" in {op.name for op in result.operations}
    assert "forward.embedding" not in {op.name for op in result.operations}


def test_a_grid_gives_what_single_plans_give() -> None:
    axes: dict[str, tuple[int, ...]] = {
        "zero_stages": (0, 1, 2, 3),
        "world_sizes": (1, 8, 64),
        "micro_batches": (1, 3),
        "sequence_lengths": (256, 1024),
    }
    workload = TrainingWorkload(grad_accumulation=2, checkpointing=Checkpointing.FULL)
    grid = training_speed_grid(GPT2, workload, Parallelism(), H200, **axes)
    for place in itertools.product(*(range(len(values)) for values in axes.values())):
        stage, n, b, s = (values[i] for values, i in zip(axes.values(), place, strict=True))
        single = training_throughput(
            GPT2,
            replace(workload, micro_batch=b, sequence_length=s),
            Parallelism(zero_stage=stage, world_size=n),
            H200,
        )
        assert grid["step_time_s"][place] == pytest.approx(single.step_time_s, rel=1e-12)
        assert grid["tokens_per_s"][place] == pytest.approx(single.tokens_per_s, rel=1e-12)
        assert grid["mfu"][place] == pytest.approx(single.mfu, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 2048),
    st.integers(1, 2**19),
    st.sampled_from([Attention.EAGER, Attention.SDPA]),
    st.sampled_from(list(Precision)),
)
def test_twice_the_rows_or_the_length_never_take_less_time(
    b: int, s: int, attention: Attention, precision: Precision
) -> None:
    workload = TrainingWorkload(
        micro_batch=b, sequence_length=s, attention=attention, precision=precision
    )
    for spec in (LLAMA, resolve_model("mixtral-8x7b")):
        times = [
            training_throughput(spec, w, Parallelism(), H200).step_time_s
            for w in (
                workload,
                replace(workload, micro_batch=2 * b),
                replace(workload, sequence_length=2 * s),
            )
        ]
        assert times[0] <= min(times[1:]) * (1 + 1e-9)
