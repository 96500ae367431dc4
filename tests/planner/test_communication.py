"""Collective volumes of a step, worked out by hand for Llama-3.1-8B."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.communication import (
    group_collectives,
    link_bytes_s,
    link_notes,
)
from planner.hardware import custom_gpu, resolve_gpu
from planner.memory.parallel import stage_specs
from planner.presets import resolve_model
from planner.throughput import training_throughput
from planner.workload import (
    Checkpointing,
    Engine,
    Parallelism,
    Precision,
    TrainingWorkload,
)

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
P = 8_030_261_248
LAYERS = P - 2 * 128256 * 4096 - 4096
H200 = resolve_gpu("h200")


def volumes(
    engine: Engine, stage: int, n: int = 8, **workload: Any
) -> dict[str, tuple[float, int]]:
    """Return bytes and calls by collective."""
    parallelism = Parallelism(engine=engine, zero_stage=stage, world_size=n)
    found = training_throughput(LLAMA, TrainingWorkload(**workload), parallelism, H200)
    return {item.collective: (float(item.bytes), item.count) for item in found.communication}


def test_stages_zero_to_two_send_two_parameters_worth_and_stage_three_one_more() -> None:
    ring = 7 / 8
    assert volumes(Engine.PEAKMARK, 0) == {"all_reduce": (2 * 2 * P * ring, 34)}
    for stage in (1, 2):
        assert volumes(Engine.PEAKMARK, stage) == {
            "all_gather": (2 * P * ring, 34),
            "reduce_scatter": (2 * P * ring, 34),
        }
    # Embedding and head are gathered once a micro-batch, the layers for forward and backward.
    assert volumes(Engine.PEAKMARK, 3) == {
        "all_gather": (2 * (P + LAYERS) * ring, 66),
        "reduce_scatter": (2 * P * ring, 34),
    }


def test_accumulation_repeats_what_happens_for_every_micro_batch() -> None:
    ring = 7 / 8
    four = {"grad_accumulation": 4}
    assert volumes(Engine.PEAKMARK, 0, **four) == volumes(Engine.PEAKMARK, 0)
    assert volumes(Engine.PEAKMARK, 1, **four) == volumes(Engine.PEAKMARK, 1)
    assert volumes(Engine.PEAKMARK, 2, **four) == {
        "all_gather": (2 * P * ring, 34),
        "reduce_scatter": (4 * 2 * P * ring, 4 * 34),
    }
    assert volumes(Engine.PEAKMARK, 3, **four) == {
        name: (4 * size, 4 * calls) for name, (size, calls) in volumes(Engine.PEAKMARK, 3).items()
    }


def test_fsdp2_reduces_in_fp32_and_gathers_in_bf16_when_mixed() -> None:
    ring = 63 / 64
    assert volumes(Engine.FSDP2, 3, n=64) == {
        "all_gather": (2 * (P + LAYERS) * ring, 65),
        "reduce_scatter": (4 * P * ring, 33),
    }
    assert volumes(Engine.FSDP2, 2, n=64, grad_accumulation=3)["all_gather"] == (
        3 * 2 * P * ring,
        3 * 33,
    )
    # Embedding and head are one unit of FSDP2's, two groups of ours.
    bf16 = volumes(Engine.FSDP2, 3, precision=Precision.BF16)
    ours = volumes(Engine.PEAKMARK, 3)
    assert bf16 == {name: (size, calls - 1) for name, (size, calls) in ours.items()}


def test_ddp_reduces_its_buckets_and_zero_redundancy_broadcasts_every_parameter() -> None:
    ring, bf16 = 7 / 8, {"precision": Precision.BF16}
    # Buckets of 25 MiB and more. Per layer, from its end: the norms wait for down_proj (112 MiB);
    # up, gate and o each fill one; v and k (8 MiB each) wait for q. Head first, embedding last.
    buckets = 1 + 32 * 5 + 1
    assert volumes(Engine.DDP, 0, **bf16) == {"all_reduce": (2 * 2 * P * ring, buckets)}
    assert volumes(Engine.ZERO_REDUNDANCY, 1, grad_accumulation=2, **bf16) == {
        "all_reduce": (2 * 2 * 2 * P * ring, 2 * buckets),
        "broadcast": (2 * P * ring, 2 + 9 * 32 + 1),
    }


def test_deepspeed_all_reduces_buckets_and_fetches_what_does_not_stay() -> None:
    ring, two = 7 / 8, {"grad_accumulation": 2}
    # 8.03 billion elements in buckets of at most 5e8: head alone (525 million), embedding alone,
    # and 218 million of a layer go two to a bucket.
    calls = volumes(Engine.DEEPSPEED, 2)["all_reduce"][1]
    assert 17 <= calls <= 19
    for stage in (1, 2):
        rounds = stage  # stage 1 waits for the last micro-batch
        assert volumes(Engine.DEEPSPEED, stage, **two) == {
            "all_gather": (2 * P * ring, 1),
            "all_reduce": (rounds * 2 * 2 * P * ring, rounds * calls),
        }
    three = volumes(Engine.DEEPSPEED, 3)
    assert three["reduce_scatter"] == (2 * P * ring, calls)
    # All but a billion elements come once for the forward and once for the backward.
    assert 2 * (2 * P - 1.6e9) * ring < three["all_gather"][0] < 2 * 2 * P * ring


def test_fp32_sends_twice_as_much() -> None:
    double = volumes(Engine.PEAKMARK, 1, precision=Precision.AUTOCAST)
    assert double["all_gather"][0] == 2 * volumes(Engine.PEAKMARK, 1)["all_gather"][0]


def test_one_rank_sends_nothing() -> None:
    assert volumes(Engine.PEAKMARK, 3, n=1) == {}


def test_beyond_a_node_the_slower_link_counts_and_is_said() -> None:
    assert link_bytes_s(H200, np.array([1.0, 8.0, 9.0, 64.0])).tolist() == [
        450e9,
        450e9,
        50e9,
        50e9,
    ]
    assert float(link_bytes_s(resolve_gpu("gb200"), 72.0)) == 900e9
    assert float(link_bytes_s(resolve_gpu("l4"), 16.0)) == 31.5e9
    assert link_notes(H200, 8) == []
    assert "50 GB/s" in link_notes(H200, 9)[0]


def test_an_unknown_link_is_taken_as_the_slowest_and_said() -> None:
    gpu = custom_gpu(
        {
            "visible_bytes": 10**10,
            "mem_bandwidth_bytes_s": 1e12,
            "peak_dense_flop_s": {"bf16": 1e14},
        }
    )
    assert float(link_bytes_s(gpu, 4.0)) == 31.5e9
    assert "PCIe 4" in link_notes(gpu, 4)[0]
    assert link_notes(gpu, 1) == []


MIXTRAL = resolve_model("mistralai/Mixtral-8x7B-v0.1")
TOKENS, HIDDEN = 4096, 4096


def inside(
    sizes: dict[str, int], stage: int = 0, model: str = "llama", **workload: Any
) -> dict[str, tuple[float, int]]:
    """Return what one GPU sends inside the layers for one row of 4,096 tokens."""
    parallelism = Parallelism(world_size=8, **sizes)  # type: ignore[arg-type]
    spec = stage_specs(MIXTRAL if model == "mixtral" else LLAMA, parallelism)[stage]
    tokens = TOKENS / parallelism.context_parallel
    found = group_collectives(spec, TrainingWorkload(**workload), parallelism, H200, tokens)
    return {item.collective: (float(item.bytes), item.count) for item in found}


def test_what_nothing_splits_sends_nothing_inside_its_layers() -> None:
    assert inside({}) == {}


def test_tensor_parallel_layers_sum_twice_forward_and_twice_backward() -> None:
    # 32 layers x 4, the embedding's and the head's; an all-reduce over 4 sends 2 x 3/4.
    one = TOKENS * HIDDEN * 2 * 2 * 3 / 4
    assert inside({"tensor_parallel": 4}) == {"tensor_all_reduce": (130 * one, 130)}
    again = inside({"tensor_parallel": 4}, checkpointing=Checkpointing.FULL, grad_accumulation=2)
    assert again == {"tensor_all_reduce": (2 * 194 * one, 2 * 194)}


def test_a_ring_passes_keys_and_values_on_and_in_the_backward_their_gradients_too() -> None:
    # (4 - 1) steps of 1,024 tokens x 2 x 1,024 columns x 2 B: once forward, twice backward.
    sent = 32 * 3 * 3 * 1024 * 2 * 1024 * 2
    assert inside({"context_parallel": 4}) == {"ring_exchange": (sent, 32 * 3 * 3)}


def test_gradients_are_summed_over_context_parallel_gpus_as_over_data_parallel_ones() -> None:
    def sent(world_size: int, context: int) -> list[tuple[str, float]]:
        parallelism = Parallelism(zero_stage=2, world_size=world_size, context_parallel=context)
        found = training_throughput(LLAMA, TrainingWorkload(), parallelism, H200).communication
        sums = ("all_gather", "reduce_scatter")
        return [(one.collective, float(one.bytes)) for one in found if one.collective in sums]

    assert sent(2, 4) == sent(8, 1) != sent(2, 1)


def test_stages_send_activations_forward_and_gradients_back() -> None:
    one = TOKENS * HIDDEN * 2
    ends = {"pipeline_send": (8 * one, 8)}
    assert inside({"pipeline_parallel": 4}, 0, grad_accumulation=8) == ends
    assert inside({"pipeline_parallel": 4}, 3, grad_accumulation=8) == ends
    middle = inside({"pipeline_parallel": 4}, 1, grad_accumulation=8)
    assert middle == {"pipeline_send": (16 * one, 16)}


def test_experts_receive_and_return_two_copies_of_each_token() -> None:
    # Two experts a token, three of four ranks elsewhere; out and back, forward and backward.
    one = 2 * TOKENS * HIDDEN * 2 * 3 / 4
    sent = inside({"expert_parallel": 4}, model="mixtral")
    assert sent == {"expert_all_to_all": (32 * 4 * one, 32 * 4)}
