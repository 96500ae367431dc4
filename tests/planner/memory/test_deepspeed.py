"""DeepSpeed's stages against figures measured with deepspeed 0.19.8, and worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from planner.memory.deepspeed import (
    BUCKET_NUMEL,
    Bucket,
    DeepSpeedStates,
    buckets_after_backward,
    flat_partition,
    reductions,
    sharded_partition,
)
from planner.memory.deepspeed_fetch import MAX_LIVE_NUMEL, Step, _calls, steady_fetches
from planner.memory.groups import Place
from planner.memory.recorder import Recorder
from planner.memory.replay import Memory, ModelReplay
from planner.memory.replay_deepspeed import DeepSpeedReplay
from planner.memory.templates import load_steps, traced
from planner.memory.training import training_grid, training_memory
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.units import MIB_BYTES
from planner.workload import Attention, Engine, Optimizer, Parallelism, Precision, TrainingWorkload

# hidden 2048, 16 layers, untied vocabulary of 128,256: 1.5 billion parameters.
MODEL = resolve_model("meta-llama/Llama-3.2-1B", {"tie_word_embeddings": False})
LAYER = 60_821_504
EMBEDDING = 128256 * 2048


@pytest.mark.parametrize(
    ("ranks", "stage", "peak_mib", "reserved_mib"),
    [
        (8, 1, 17_935, 19_588),
        (8, 2, 17_935, 19_588),
        # What stage 3 reserves depends on how the model came to be, which is not on record here: the
        # recorded rows of stage 3 are compared instead.
        (8, 3, 18_673, None),
        (64, 3, 16_172, None),
        (1, 2, 32_940, None),
    ],
)
def test_peaks_are_those_measured_on_an_h200(
    ranks: int, stage: int, peak_mib: int, reserved_mib: int | None
) -> None:
    """Rank 0 over the fake process group, micro-batch 1, s 4096, SDPA, steady state, fused AdamW."""
    parallelism = Parallelism(engine=Engine.DEEPSPEED, zero_stage=stage, world_size=ranks)
    memory = training_memory(MODEL, TrainingWorkload(sequence_length=4096), parallelism)
    assert memory.allocated_bytes / MIB_BYTES == pytest.approx(peak_mib, rel=5e-4)
    if reserved_mib:
        reserved = memory.overheads.reserved_bytes / MIB_BYTES
        assert reserved == pytest.approx(reserved_mib, rel=0.01)
    ledger = memory.to_dict()["ledger"]
    assert sum(row["bytes"] for row in ledger) == memory.allocated_bytes


@pytest.mark.parametrize(
    ("ranks", "stage", "after_step_mib"),
    [(8, 1, 5_066), (8, 2, 5_066), (8, 3, 3_877), (64, 3, 1_376), (1, 2, 20_071)],
)
def test_what_stays_after_a_step_is_what_was_measured(
    ranks: int, stage: int, after_step_mib: int
) -> None:
    states = DeepSpeedStates(
        MODEL, Precision.MIXED, Optimizer.ADAMW_FUSED, stage, ranks, accumulates=False
    )
    workspaces_mib = 64
    held = sum(states.persistent().values()) / MIB_BYTES + workspaces_mib
    assert held == pytest.approx(after_step_mib, abs=1.5)


def test_rank_0_of_eight_owns_a_piece_of_the_embedding() -> None:
    part = flat_partition(MODEL, 8)
    assert part.padded == MODEL.parameters  # divisible by 16
    assert part.shard == part.largest_own == MODEL.parameters // 8 < EMBEDDING
    assert (part.own, part.num_own) == (EMBEDDING, 1)
    assert flat_partition(MODEL, 7).padded % 14 == 0
    everything = 2 + 9 * 16 + 1
    assert sharded_partition(MODEL, 8).num_own == everything


def test_buckets_are_reduced_when_the_next_gradient_does_not_fit() -> None:
    # The head and the norm, then three whole layers and most of a fourth.
    found = reductions(MODEL)
    first = min(found, key=lambda place: (place.section != "layer_backward", -place.layer))
    assert first == Place("layer_backward", 12)
    filled = [bucket for buckets in found.values() for bucket in buckets]
    assert sum(bucket.numel for bucket in filled) == MODEL.parameters
    assert max(bucket.numel for bucket in filled) <= BUCKET_NUMEL
    # Each begins where the one reduced after it ends.
    assert [b.start for b in filled[:-1]] == [b.start + b.numel for b in filled[1:]]
    assert filled[-1].start == 0


def test_a_gradient_larger_than_a_bucket_is_reduced_by_itself() -> None:
    # 128,256 x 4,096 = 525 million elements, in rank 0's part of eight: nothing is copied.
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    first, second, third = buckets_after_backward(spec)[:3]
    assert first == Bucket(0, 128_256 * 4096) and first.is_large and not second.is_large
    shard = flat_partition(spec, 8).shard
    assert [b.copies(shard) for b in (first, second, third)] == [[], [], [third.numel]]
    assert third.start < shard < third.start + third.numel
    # Seven buckets of 944 MiB (to the MiB) reach over a border: copies seen on an H200.
    copies = [n * 2 // MIB_BYTES for b in buckets_after_backward(spec) for n in b.copies(shard)]
    assert copies == [944] * 7


def test_a_large_gradient_of_many_ranks_is_copied_bucket_by_bucket() -> None:
    # Seen on an H200 with 64 ranks: four slices are 957.28 MiB, the fifth is one tensor already.
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    shard = flat_partition(spec, 64).shard
    assert Bucket(0, 128_256 * 4096).copies(shard) == [4 * shard]
    assert 4 * shard * 2 / MIB_BYTES == pytest.approx(957.28, abs=0.01)
    # On one rank nothing is ever copied.
    whole = flat_partition(spec, 1).shard
    assert not any(b.copies(whole) for found in reductions(spec).values() for b in found)


def test_rank_0_keeps_gradients_from_the_first_bucket_with_one_of_its_own() -> None:
    # Seven eighths of the model are other ranks': its own piece of the embedding comes last.
    states = states_of(MODEL, 2, accumulates=False)
    assert states.at(Place("layer_backward", 0))["gradients"] == 2 * BUCKET_NUMEL
    at_end = states.at_section_end(Place("embed_backward"))["temporary"]
    before, last = reductions(MODEL)[Place("embed_backward")]
    assert last == Bucket(0, EMBEDDING) and before.start == EMBEDDING > before.numel
    assert at_end == 2 * EMBEDDING
    # On one rank the first bucket is its own, and with it the buffer for all comes.
    alone = states_of(MODEL, 2, accumulates=False, ranks=1)
    gradients = alone.at(Place("layer_backward", 0))["gradients"]
    assert gradients == 2 * (BUCKET_NUMEL + MODEL.parameters)


@pytest.mark.parametrize(("stage", "large_waits"), [(1, False), (2, True), (3, True)])
def test_a_gradient_larger_than_a_bucket_waits_for_its_reduction(
    stage: int, large_waits: bool
) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 2})
    parallelism = Parallelism(engine=Engine.DEEPSPEED, zero_stage=stage, world_size=8)
    memory = Memory()
    engine = DeepSpeedReplay(spec, TrainingWorkload(), parallelism, memory, 64 * MIB_BYTES)
    allocated = memory.allocator.serve().allocated_bytes
    gradient = memory.allocator.allocate(128_256 * 4096 * 2)
    assert engine.keeps(gradient) is large_waits
    assert not engine.keeps(memory.allocator.allocate(MIB_BYTES))
    if large_waits:
        engine.gradient(128_256 * 4096 * 2)
        assert (
            memory.allocator.serve().allocated_bytes == allocated + gradient.size_bytes + MIB_BYTES
        )
        engine.gradient(4096 * 2)  # the next one has no room beside it
        assert memory.allocator.serve().allocated_bytes == allocated + MIB_BYTES


def test_buckets_are_reduced_as_the_gradients_come() -> None:
    """Llama's layer: down, up, gate, a norm, o, v, k, q, a norm; bytes as bf16 has them."""
    spec = resolve_model("meta-llama/Llama-3.2-1B", {"num_hidden_layers": 2})
    told: list[int] = []

    class Listening(DeepSpeedReplay):
        def gradient(self, size_bytes: int) -> None:
            told.append(size_bytes)
            super().gradient(size_bytes)

    parallelism = Parallelism(engine=Engine.DEEPSPEED, zero_stage=2, world_size=8)
    workload = TrainingWorkload(sequence_length=512)
    memory = Memory()
    engine = Listening(spec, workload, parallelism, memory, 64 * MIB_BYTES)
    template = traced(spec, workload, 512)
    model = ModelReplay(spec, load_steps(template, "added"), memory, engine, 1, 512, False)
    engine.start()
    model.micro_batch(0, is_last=True)
    norm, square, narrow, wide = 2048, 2048**2, 2048 * 512, 2048 * 8192
    layer = [wide, wide, wide, norm, square, narrow, narrow, square, norm]
    # The head is tied: its share comes with the embedding's.
    assert told == [2 * numel for numel in (norm, *layer, *layer, EMBEDDING)]


def test_what_is_free_is_given_back_before_the_flat_buffer_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A tied head is a tensor of its own until it is tied: 501 MiB, a segment of 502.
    spec = resolve_model("meta-llama/Llama-3.2-1B")
    parallelism = Parallelism(engine=Engine.DEEPSPEED, zero_stage=2, world_size=8)

    def reserved_bytes() -> int:
        memory = Memory()
        DeepSpeedReplay(spec, TrainingWorkload(), parallelism, memory, 64 * MIB_BYTES).start()
        return memory.allocator.serve().reserved_bytes

    given_back = reserved_bytes()
    monkeypatch.setattr(Recorder, "empty_cache", lambda self: None)
    assert reserved_bytes() - given_back == 502 * MIB_BYTES


def test_what_comes_in_one_buffer_is_copied_out_once_and_the_buffer_dropped_last() -> None:
    events = [e for found in steady_fetches(MODEL, recomputes=True).events.values() for e in found]
    together = [e for e in events if e.step is Step.GATHER and len(e.parameters) > 1]
    for gathered in together:
        steps = [
            e.step
            for e in events
            if e.call == gathered.call and e.parameters == gathered.parameters
        ]
        assert steps.count(Step.COPY_OUT) <= 1
        if Step.DROP_BUFFER in steps:
            assert steps.index(Step.COPY_OUT) < steps.index(Step.DROP_BUFFER)


def test_every_module_fetches_ahead_as_it_begins() -> None:
    """Gathers of a steady step seen on an H200 (Qwen3-1.7B, fake group of 64 ranks, recomputing)."""
    fetches = steady_fetches(resolve_model("Qwen/Qwen3-1.7B"), recomputes=True)

    def gathered(place: Place) -> list[int]:
        return [
            sum(p.numel for p in event.parameters) * 2
            for event in fetches.events[place]
            if event.step is Step.GATHER
        ]

    layer = 96 * MIB_BYTES  # what 50 million elements reach to: a whole layer
    assert gathered(Place("embed")) == [151_936 * 2048 * 2, layer, layer, layer]
    # The layer, attention and MLP, seven linears, four norms, the activation; then a billion is live.
    assert gathered(Place("layer", 0)) == [layer] * 15
    assert gathered(Place("layer", 1))[:3] == [layer] * 3


def test_a_layer_that_runs_again_fetches_its_last_linear_before_the_others() -> None:
    calls = list(_calls(MODEL, recomputes=True))
    turns = [call for call in calls if call.place == Place("layer_backward", 3)]
    held = [(call.parameters[0].name.split(".")[-2], call) for call in turns if call.parameters]
    assert [name for name, _ in held[:3]] == ["down_proj", "input_layernorm", "q_proj"]
    down = [call for name, call in held if name == "down_proj"]
    # Before the forward runs again, as that ends early, and after its own backward.
    assert [(c.fetches, c.releases) for c in down] == [(True, False), (True, False), (False, True)]
    # What follows are the other linears backwards.
    linears = [name for name, _ in held if name.endswith("proj")]
    assert linears[-6:] == ["up_proj", "gate_proj", "o_proj", "v_proj", "k_proj", "q_proj"]


def test_stage_3_fetches_ahead_up_to_a_billion_elements() -> None:
    fetches = steady_fetches(MODEL, recomputes=False)
    at_loss = fetches.live[Place("loss_backward")]
    assert MAX_LIVE_NUMEL <= at_loss < MAX_LIVE_NUMEL + 8192 * 2048
    # 33 norms of 2048 elements are never sharded.
    assert fetches.persistent_numel == 33 * 2048
    # Forward and backward gather everything once, but for what stays between them.
    assert MODEL.parameters < fetches.gathered_numel < 2 * MODEL.parameters


def test_a_model_that_fits_the_limits_is_gathered_once_and_stays() -> None:
    small = resolve_model("meta-llama/Llama-3.2-1B", {"num_hidden_layers": 3})
    fetches = steady_fetches(small, recomputes=False)
    assert fetches.gathered_numel == small.parameters - fetches.persistent_numel
    assert fetches.live[Place("head")] == fetches.gathered_numel


def states_of(spec: ModelSpec, stage: int, accumulates: bool, ranks: int = 8) -> DeepSpeedStates:
    return DeepSpeedStates(
        spec, Precision.MIXED, Optimizer.ADAMW_FUSED, stage, ranks, accumulates=accumulates
    )


def test_the_optimizer_step_casts_the_gradients_of_its_shard() -> None:
    shard = MODEL.parameters // 8
    step = states_of(MODEL, 2, accumulates=False).optimizer_step()
    # One piece of one gradient: no flat copy, and its norm in fp64 is the most.
    assert step == {"gradients": 2 * EMBEDDING, "temporary": 8 * shard}
    whole = states_of(MODEL, 2, accumulates=False, ranks=1).optimizer_step()
    assert whole["temporary"] == (2 + 4) * MODEL.parameters


def test_gradients_between_micro_batches_are_whole_at_stage_1_and_own_at_stage_2() -> None:
    at = Place("layer", 3)
    assert states_of(MODEL, 1, accumulates=True).at(at)["gradients"] == 2 * MODEL.parameters
    assert states_of(MODEL, 2, accumulates=True).at(at)["gradients"] == 2 * EMBEDDING
    assert states_of(MODEL, 1, accumulates=False).at(at)["gradients"] == 0
    backward = Place("layer_backward", 14)
    kept = states_of(MODEL, 1, accumulates=False).at(backward)["gradients"]
    assert kept == 2 * (EMBEDDING + 2048 + LAYER + BUCKET_NUMEL)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_replay_formulas_and_grid_see_the_same_peak(stage: int, accumulation: int) -> None:
    spec = resolve_model("meta-llama/Llama-3.2-1B", {"num_hidden_layers": 4})
    workload = TrainingWorkload(
        sequence_length=512, attention=Attention.EAGER, grad_accumulation=accumulation
    )
    parallelism = Parallelism(engine=Engine.DEEPSPEED, zero_stage=stage, world_size=4)
    replayed = training_memory(spec, workload, parallelism).allocated_bytes
    summed = training_memory(spec, workload, parallelism, segment_share=0.1).allocated_bytes
    assert replayed == pytest.approx(summed, rel=0.03)
    grid = training_grid(spec, workload, Engine.DEEPSPEED, (stage,), (2, 4), (1,), (512,))
    assert grid["allocated_bytes"].dtype == np.int64
    assert grid["allocated_bytes"][0, 1, 0, 0] == summed


def test_stage_3_steps_whole_parameters_until_they_are_a_billion_elements() -> None:
    # Eight ranks step an eighth of 8,030,261,248 elements at once (seen on an H200: 3829.127 MiB).
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    assert sharded_partition(spec, 8).stepped == (8_030_261_248 // 8,)
    # Two ranks: the first three groups end with the parameter that reaches a billion.
    *whole, rest = sharded_partition(spec, 2).stepped
    assert len(whole) == 3 and sum(whole) + rest == 8_030_261_248 // 2
    assert all(1e9 <= numel < 1e9 + EMBEDDING for numel in whole)
    assert flat_partition(spec, 2).stepped == (flat_partition(spec, 2).shard,)


def test_every_small_parameter_stays_gathered_from_the_start() -> None:
    memory = Memory()
    parallelism = Parallelism(engine=Engine.DEEPSPEED, zero_stage=3, world_size=8)
    DeepSpeedReplay(MODEL, TrainingWorkload(), parallelism, memory, 64 * MIB_BYTES).start()
    assert (
        sum(memory.holds(("small", number)) for number in range(1000)) == 33
    )  # two norms in each of 16 layers, and the last
