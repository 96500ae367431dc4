"""The parts of a step: kernels as the models run them, the engines' bytes, the host, what is hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.config_input import spec_from_config
from planner.hardware import resolve_gpu
from planner.memory.kinds import layer_kinds
from planner.model import ModelSpec
from planner.payloads import stage3_parameters
from planner.presets import resolve_model
from planner.speed.calibrated import rates_of, rows_used
from planner.speed.engine_work import (
    gather_parts,
    gradient_parts,
    trained_parameters,
    update_parts,
)
from planner.speed.gpu_time import Part, micro_batch_parts
from planner.speed.host import HostTable, host_time
from planner.speed.operation_lists import list_key, operation_list
from planner.speed.step import PHASES, Sent, Step, _exposed_s, _slowed, training_step
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    LoraTargets,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
RATES = rates_of(resolve_gpu("h200"))
P = 8_030_261_248


def parts(spec: ModelSpec = LLAMA, b: float = 1.0, **values: Any) -> list[Part]:
    workload = TrainingWorkload(**values)
    kinds = layer_kinds(spec, workload)
    return micro_batch_parts(spec, workload, kinds, RATES, b, float(workload.sequence_length))


def total(found: list[Part], field: str, name: str, phase: str | None = None) -> float:
    return sum(
        float(getattr(part, field))
        for part in found
        if part.name == name and phase in (None, part.phase)
    )


def test_products_and_attention_compute_what_a_hand_counts() -> None:
    found = parts()
    # q and o 4096 x 4096, k and v 4096 x 1024, three products of the MLP with 14336.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert total(found, "flops", "products", "forward") == 2 * 4096 * 32 * layer
    assert total(found, "flops", "products", "backward") == 2 * 2 * 4096 * 32 * layer
    assert total(found, "flops", "head", "forward") == 2 * 4096 * 4096 * 128256
    causal = 32 * 4 * 4096 * (4096 * 4097 / 2)
    assert total(found, "flops", "attention", "forward") == causal
    assert total(found, "flops", "attention", "backward") == 2.5 * causal


def test_kernels_of_a_layer_are_those_that_transformers_starts() -> None:
    workload = TrainingWorkload()
    found = operation_list(LLAMA, workload, ("plain",) * 32)
    deeper = operation_list(LLAMA, workload, ("plain",) * 33)
    # Two RMS norms of eight, seven products, rotary positions of five for queries and keys each,
    # attention, two residual sums, the activation and its product: 16 + 7 + 10 + 1 + 2 + 2.
    assert deeper.launches[0] - found.launches[0] == 38
    assert found.attention == {
        (0, "attention_forward", False): 32,
        (1, "attention_backward", False): 32,
    }


def test_grouped_heads_are_copied_to_all_only_where_they_are_grouped() -> None:
    grouped = parts(attention=Attention.EAGER)
    spec = replace(LLAMA, num_kv_heads=32)
    alone = parts(spec, attention=Attention.EAGER)
    launches = [total(found, "launches", "elementwise", "forward") for found in (grouped, alone)]
    assert launches[0] - launches[1] == 2 * 32  # keys and values of every layer


def test_a_checkpointed_layer_runs_its_forward_again() -> None:
    plain, again = parts(), parts(checkpointing=Checkpointing.FULL)
    for name in ("products", "attention"):
        once = total(plain, "flops", name, "forward")
        assert total(again, "flops", name, "recompute") == once
    assert total(again, "flops", "head", "recompute") == 0


def test_a_grid_of_shapes_gives_what_single_ones_give() -> None:
    workload = TrainingWorkload()
    kinds = layer_kinds(LLAMA, workload)
    b, s = np.array([[1.0], [3.0]]), np.array([512.0, 4096.0])
    grid = micro_batch_parts(LLAMA, workload, kinds, RATES, b, s)
    for i, j in np.ndindex(2, 2):
        single = micro_batch_parts(LLAMA, workload, kinds, RATES, b[i, 0], s[j])
        for one, many in zip(single, grid, strict=True):
            assert float(one.time_s) == pytest.approx(float(many.time_s[i, j]), rel=1e-12)


def _bytes(found: list[Part]) -> float:
    return sum(float(part.bytes) for part in found)


@pytest.mark.parametrize(
    ("engine", "stage", "per_parameter"),
    [
        # Zeros written, then read, added to what is there and written, in bf16.
        (Engine.PEAKMARK, 0, 2 + 6),
        (Engine.PEAKMARK, 2, 2 + 6),
        # Cast into the buffer of the reduction: read in bf16, written in fp32.
        (Engine.FSDP2, 3, 6),
    ],
)
def test_gradients_move_the_bytes_of_their_engines_code(
    engine: Engine, stage: int, per_parameter: int
) -> None:
    workload = TrainingWorkload()
    sizes = trained_parameters(LLAMA, workload, engine, 8.0)
    assert _bytes(gradient_parts(workload, engine, stage, sizes, RATES)) == per_parameter * P


def test_fsdp2_copies_experts_that_are_fewer_than_ranks_with_their_padding() -> None:
    workload, spec = TrainingWorkload(), resolve_model("mistralai/Mixtral-8x7B-v0.1")
    sizes = trained_parameters(spec, workload, Engine.FSDP2, 64.0)
    # 32 layers of eight experts, 28,672 x 4,096 and 4,096 x 14,336, and their router's eight rows of 4,096:
    # as if they were 64. The vocabulary, 32,000, is a multiple of 64, as all other dimensions are.
    one = 32 * (28_672 * 4096 + 4096 * 14_336 + 4096)
    assert sizes.whole == spec.parameters
    assert sizes.gathered == sizes.reduced == spec.parameters + (64 - 8) * one
    moved = _bytes(gradient_parts(workload, Engine.FSDP2, 3, sizes, RATES))
    assert moved == 2 * sizes.whole + 4 * sizes.reduced
    ours = trained_parameters(spec, workload, Engine.PEAKMARK, 64.0)
    assert ours.gathered == ours.reduced == ours.whole


def test_gathers_move_the_bytes_of_their_engines_code() -> None:
    workload = TrainingWorkload()
    sizes = trained_parameters(LLAMA, workload, Engine.FSDP2, 8.0)
    # Ours casts its part of the fp32 master, twice at stage 3; FSDP2 does and copies all of it out.
    assert _bytes(gather_parts(workload, Engine.PEAKMARK, 1, sizes, RATES)) == 6 * P / 8
    assert _bytes(gather_parts(workload, Engine.PEAKMARK, 3, sizes, RATES)) == 2 * 6 * P / 8
    assert _bytes(gather_parts(workload, Engine.FSDP2, 3, sizes, RATES)) == 2 * (6 * P / 8 + 4 * P)
    assert gather_parts(workload, Engine.DDP, 0, sizes, RATES) == []


def test_the_update_moves_its_states_and_the_casts_around_it() -> None:
    def moved(engine: Engine, stage: int, precision: Precision) -> float:
        workload = TrainingWorkload(precision=precision)
        sizes = trained_parameters(LLAMA, workload, engine, 8.0)
        return _bytes(update_parts(LLAMA, workload, engine, stage, sizes, RATES))

    # Parameter, gradient and two moments read, three written: 7 x 4 bytes; the gradient cast up 6,
    # the parameter cast down 6 where the master is no shard that a gather casts.
    assert moved(Engine.PEAKMARK, 0, Precision.MIXED) == (28 + 6 + 6) * P
    assert moved(Engine.PEAKMARK, 1, Precision.MIXED) == (28 + 6) * P / 8
    assert moved(Engine.FSDP2, 3, Precision.MIXED) == 28 * P / 8
    assert moved(Engine.DDP, 0, Precision.BF16) == 14 * P


def test_the_host_takes_its_time_for_every_kernel_and_what_an_engine_adds() -> None:
    table = HostTable(
        kernel_s={"llama": (2e-5, 1e-5), "": (9.0, 9.0)},
        step_s=(1e-3, 2e-3),
        extra_kernels={"fsdp2/3": (10.0, 20.0), "checkpoint": (5.0, 7.0)},
        update_s={"peakmark/0": 1e-4, "fsdp2/3": 3e-4, "muon": 1.0},
        stage3_s={"parameter": 9.0, "piece": 9.0},
        module_s=(1e-5, 3e-5),
        paces=(2.0, 3.0),
    )
    launches = {"forward": 1000.0, "backward": 2000.0, "recompute": 900.0}
    workload = TrainingWorkload(checkpointing=Checkpointing.FULL, grad_accumulation=3)
    found = host_time(
        table, LLAMA, workload, Parallelism(engine=Engine.FSDP2, zero_stage=3), launches
    )
    assert found.forward_s == pytest.approx(2 * 3 * ((1000 + 32 * (10 + 5)) * 2e-5 + 1e-3))
    again = 900 * 2e-5
    assert found.backward_s == pytest.approx(3 * 3 * ((2000 + 32 * (20 + 7)) * 1e-5 + again + 2e-3))
    assert found.optimizer_s == pytest.approx(2 * 32 * 3e-4)
    # One that goes forward through a small module in as long, and back in half as long.
    quicker = host_time(
        table.at_pace(2e-5, 4.5e-5),
        LLAMA,
        workload,
        Parallelism(engine=Engine.FSDP2, zero_stage=3),
        launches,
    )
    assert quicker.forward_s == pytest.approx(found.forward_s)
    assert quicker.backward_s == pytest.approx(found.backward_s / 2)


SPARE = HostTable(
    kernel_s={"": (1e-5, 2e-5)},
    step_s=(0.0, 0.0),
    extra_kernels={"checkpoint": (0.0, 0.0), "triton": (4.0, 6.0)},
    update_s={"peakmark/0": 1e-4, "fsdp2/adamw_loop": 5e-3},
    stage3_s={"parameter": 1e-3, "piece": 1e-6},
    module_s=(1e-5, 3e-5),
    paces=(1.0, 1.0),
)


def test_deepspeeds_stage_3_works_on_every_parameter_and_every_ranks_piece() -> None:
    # 32 layers of nine tensors, embedding, head and last norm; the 65 norms are kept whole. Without
    # recomputation the steady step fetches its 226 others in the forward and some again.
    counted = stage3_parameters(LLAMA, recomputes=False)
    assert (counted.forward, counted.kept, counted.every) == (226, 65, 291)
    stage3 = Parallelism(engine=Engine.DEEPSPEED, zero_stage=3)
    nothing = dict.fromkeys(("forward", "backward", "recompute"), 0.0)
    found = host_time(SPARE, LLAMA, TrainingWorkload(), stage3, nothing, 1000)
    # A gathered parameter: a millisecond, and three operations on each of a thousand pieces.
    assert found.forward_s == pytest.approx(226 * (1e-3 + 3e-3))
    again = counted.fetched - 226
    assert found.backward_s == pytest.approx(again * 4e-3 + 291 * (1e-3 + 1e-3))
    assert found.optimizer_s == pytest.approx(32 * 1e-4 + 65 * 3e-3)


def test_the_host_is_asked_about_every_operation_that_selective_checkpointing_may_keep() -> None:
    launches = {"forward": 1000.0, "backward": 2000.0, "recompute": 900.0}
    own = Parallelism()
    plain = host_time(SPARE, LLAMA, TrainingWorkload(), own, launches)
    workload = TrainingWorkload(checkpointing=Checkpointing.SELECTIVE)
    chosen = host_time(SPARE, LLAMA, workload, own, launches)
    assert chosen.forward_s - plain.forward_s == pytest.approx(900 * 1e-5)
    assert chosen.backward_s - plain.backward_s == pytest.approx(900 * 1e-5)


def test_our_attention_and_updates_one_by_one_of_sharded_tensors_take_longer() -> None:
    launches = {"forward": 1000.0, "backward": 2000.0, "recompute": 0.0}
    ours = TrainingWorkload(attention=Attention.TRITON, optimizer=Optimizer.ADAMW_LOOP)
    found = host_time(SPARE, LLAMA, ours, Parallelism(engine=Engine.FSDP2, zero_stage=2), launches)
    assert found.forward_s == pytest.approx((1000 + 32 * 4) * 1e-5)
    assert found.backward_s == pytest.approx((2000 + 32 * 6) * 2e-5)
    assert found.optimizer_s == pytest.approx(32 * 5e-3)


def test_a_phase_ends_when_its_kernels_are_done_and_not_before_they_are_started() -> None:
    times = {
        "gpu_s": {"forward": 1.0, "backward": 3.0, "optimizer": 0.5},
        "host_s": {"forward": 1.5, "backward": 1.5, "optimizer": 2.0},
        "exposed_s": dict.fromkeys(("forward", "backward", "optimizer"), 0.0),
        "parts": (),
        "sent": (),
    }
    # The host starts the forward until 1.5, so the backward runs until 4.5; the update is started by 5.
    step = Step(**times)
    assert [step.phase_s(name) for name in PHASES] == [1.5, 3.0, 0.5]
    assert step.step_time_s == 5.0
    # A host that waits for the gradients begins the update at 4.5.
    waiting = Step(**times, runs=(("forward", "backward"), ("optimizer",)))
    assert [waiting.phase_s(name) for name in PHASES] == [1.5, 3.0, 2.0]
    assert waiting.step_time_s == 6.5
    # Over several sizes at once, element by element.
    grid = Step(**{**times, "gpu_s": {**times["gpu_s"], "forward": np.array([1.0, 2.0])}})
    assert grid.step_time_s.tolist() == [5.0, 5.5]


def test_adafactor_waits_for_the_gpu_at_every_parameter() -> None:
    workload = TrainingWorkload(optimizer=Optimizer.ADAFACTOR, sequence_length=64)
    found = training_step(LLAMA, workload, Parallelism(zero_stage=0, world_size=1), RATES)
    kernels_s = sum(part.time_s for part in found.parts if part.phase == "optimizer")
    started_s = RATES.host.paces[0] * 32 * RATES.host.update_s["adafactor"]
    assert found.phase_s("optimizer") == pytest.approx(kernels_s + started_s)


def test_adapters_are_timed_by_their_own_list_whatever_the_attention() -> None:
    workload = TrainingWorkload(
        attention=Attention.TRITON, lora_rank=8, lora_targets=LoraTargets.ALL_LINEAR
    )
    assert list_key(LLAMA, workload) == "llama/sdpa/bf16/lora_all_linear"


def test_what_is_sent_is_hidden_behind_what_is_computed() -> None:
    # Ten calls of 10 ms behind a second of work: their kernels' share of it, and the last one.
    hidden = _exposed_s(1.0, [(0.1, 10)], alone=False)
    assert float(hidden) == pytest.approx(0.1 * 0.31 + 0.01)
    # Behind half a second a whole second cannot hide.
    longer = _exposed_s(0.5, [(1.0, 10)], alone=False)
    assert float(longer) == pytest.approx(0.5 + 0.1)
    assert _exposed_s(0.5, [(1.0, 10)], alone=True) == 1.0
    assert _exposed_s(0.5, [], alone=False) == 0


def test_the_longer_of_gpu_and_host_is_the_step_where_one_is_far_ahead() -> None:
    step = training_step(LLAMA, TrainingWorkload(), Parallelism(), RATES)
    assert float(step.step_time_s) == pytest.approx(max(step.gpu_step_s, step.host_step_s))
    alone = Parallelism(zero_stage=0, world_size=1)
    gpt2, short = resolve_model("gpt2"), TrainingWorkload(sequence_length=64)
    small = training_step(gpt2, short, alone, RATES)
    assert float(small.step_time_s) == pytest.approx(small.host_step_s)
    phases = sum(float(small.phase_s(name)) for name in ("forward", "backward", "optimizer"))
    assert phases == pytest.approx(float(small.step_time_s))


def test_rows_that_set_a_constant_are_named() -> None:
    # Sixteen for the host's pace, eight for DeepSpeed's stage 3, one for FSDP2's updates.
    assert len(rows_used()) == 25


def test_reductions_take_longer_beside_a_gpu_that_computes() -> None:
    one = Sent(
        collective="reduce_scatter", bytes=8.0, calls=2, time_s=1.0, shares={"backward": 1.0}
    )
    gather = replace(one, collective="all_gather", shares={"forward": 1.0})

    def slowed(busy_s: float) -> list[float]:
        return [s.time_s for s in _slowed((one, gather), {"backward": busy_s}, {"backward": 4.0})]

    # Computing for half of the time that the host takes, for three quarters, for more than it takes.
    assert slowed(2.0) == [1.0, 1.0]
    assert slowed(3.0) == pytest.approx([1.155, 1.0])
    assert slowed(9.0) == pytest.approx([1.31, 1.0])


@pytest.mark.parametrize(
    ("precision", "dtype", "loss", "products"),
    [
        # Logits; logits again, and the gradients of hidden states and of the head.
        (Precision.MIXED, "bf16", Loss.CHUNKED, 4),
        (Precision.FP32, "fp32", Loss.CHUNKED, 4),
        (Precision.AUTOCAST, "bf16", Loss.CHUNKED, 4),
        # Both gradients are made beside the logits.
        (Precision.FP32, "fp32", Loss.FUSED_LINEAR, 3),
        (Precision.MIXED, "bf16", Loss.FUSED_LINEAR, 3),
    ],
)
def test_losses_by_chunks_multiply_in_the_compute_dtype(
    precision: Precision, dtype: str, loss: Loss, products: int
) -> None:
    found = parts(precision=precision, loss=loss)
    one = 2.0 * 4096 * 128_256 * 4096
    assert total(found, "flops", "head") == pytest.approx(products * one)
    workload = TrainingWorkload(precision=precision, loss=loss)
    listed = operation_list(LLAMA, workload, layer_kinds(LLAMA, workload))
    heads = {p.dtype for p in listed.products for _, name in p.parts if name == "head"}
    assert heads == {dtype}


def test_sdpa_in_fp32_is_fused_where_heads_share_no_keys() -> None:
    fp32 = TrainingWorkload(precision=Precision.FP32)
    grouped, alone = (
        resolve_model("meta-llama/Llama-3.2-1B"),
        resolve_model("allenai/OLMo-2-0425-1B"),
    )
    # torch chooses its math implementation for grouped heads, its memory-efficient kernel otherwise
    # (backends of recorded steps: sdpa:math and sdpa:efficient).
    assert list_key(grouped, fp32) == "llama/sdpa/fp32"
    assert list_key(alone, fp32) == "olmo2/triton/fp32"
    found = operation_list(alone, fp32, layer_kinds(alone, fp32))
    assert found.attention and not any(one.kind == "bmm" for one in found.products)


def test_a_traced_model_moves_its_bytes_at_the_mean_rate_of_llamas_operations() -> None:
    bloom = spec_from_config(
        {
            "model_type": "bloom",
            "vocab_size": 250880,
            "hidden_size": 1024,
            "n_layer": 24,
            "n_head": 16,
            "layer_norm_epsilon": 1e-5,
        },
        name="bloom-560m",
    )
    workload = TrainingWorkload(attention=Attention.EAGER, sequence_length=1024, micro_batch=2)
    found = training_step(bloom, workload, Parallelism(zero_stage=0, world_size=1), RATES).parts
    like = parts(sequence_length=4096)
    for phase in ("forward", "backward"):
        rate = total(like, "bytes", "elementwise", phase) / total(
            like, "time_s", "elementwise", phase
        )
        moved = total(list(found), "bytes", "elementwise", phase)
        assert moved > 0
        assert total(list(found), "time_s", "elementwise", phase) == pytest.approx(moved / rate)
