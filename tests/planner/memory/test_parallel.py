"""Memory of split models against numbers worked by hand, for every way to split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.memory.beside import Beside
from planner.memory.groups import Place, group_numels
from planner.memory.parallel import in_flight, stage_specs
from planner.memory.sections import COMPONENTS, allocations
from planner.memory.stages import NOT_PROVEN, StepMemory, step_grid, step_memory
from planner.memory.templates import (
    has_templates,
    load_steps,
    monomial_values,
    traced,
)
from planner.memory.training import TrainingMemory, training_memory
from planner.plan import parse_plan
from planner.predict import predict
from planner.presets import resolve_model
from planner.splits import TENSOR_PARALLEL_FAMILIES
from planner.units import GIB_BYTES
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    Parallelism,
    TrainingWorkload,
)

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
MIXTRAL = resolve_model("mistralai/Mixtral-8x7B-v0.1")
P, EMBEDDING, NORM = 8_030_261_248, 128_256 * 4096, 4096
LAYER = (P - 2 * EMBEDDING - NORM) // 32
TOKENS, HIDDEN, FFN = 4096, 4096, 14_336


def step(spec: Any = LLAMA, workload: dict[str, Any] | None = None, **sizes: Any) -> StepMemory:
    """Predict a step at stage 1 on two data-parallel ranks, in `mixed` precision."""
    parallelism = Parallelism(**{"zero_stage": 1, "world_size": 2, **sizes})
    return step_memory(spec, TrainingWorkload(**(workload or {})), parallelism, segment_share=0.1)


def part(memory: TrainingMemory, name: str, phase: str = "optimizer") -> float:
    """Return the bytes of one part at the highest moment of a phase."""
    return float(memory.by_phase[phase].parts.get(name, 0))


def kept(memory: TrainingMemory) -> dict[tuple[str, ...], float]:
    """Return the bytes of a layer's tensors at the peak, by their symbolic shapes."""
    found: dict[tuple[str, ...], float] = {}
    for entry in memory.entries:
        if entry.owner == "saved for backward":
            shape = tuple(str(size) for size in entry.shape)
            found[shape] = found.get(shape, 0) + entry.size_bytes
    return found


def test_a_plan_that_splits_no_model_is_the_plain_prediction() -> None:
    workload, parallelism = TrainingWorkload(), Parallelism(zero_stage=2, world_size=4)
    found = step_memory(LLAMA, workload, parallelism)
    assert found.worst == training_memory(LLAMA, workload, parallelism)
    assert found.notes() == ()


@pytest.mark.parametrize("engine", [Engine.PEAKMARK, Engine.FSDP2])
def test_states_of_tensor_parallel_gpus_are_those_of_their_parameters(engine: Engine) -> None:
    norms = 65 * NORM
    own = (P - norms) // 4 + norms
    stage = 1 if engine is Engine.PEAKMARK else 3
    worst = step(tensor_parallel=4, engine=engine, zero_stage=stage).worst
    # `mixed`: bf16 weights whole, master and moments halved; FSDP2: fp32 shards and moments halved.
    expected = {Engine.PEAKMARK: (2 * own, 12 * own / 2), Engine.FSDP2: (4 * own / 2, 8 * own / 2)}
    parameters, optimizer = expected[engine]
    assert part(worst, "parameters") == parameters
    assert part(worst, "optimizer") == optimizer


def test_tensor_parallel_divides_what_heads_and_width_name_and_sequence_parallel_the_rest() -> None:
    alone = kept(step().worst)
    split = kept(step(tensor_parallel=4).worst)
    shared = kept(step(tensor_parallel=4, sequence_parallel=True).worst)
    for shape in (("batch", "seq", "ffn"), ("batch", "heads", "seq", "head_dim")):
        assert split[shape] == shared[shape] == alone[shape] / 4
    hidden = ("batch", "seq", "hidden")
    assert split[hidden] == alone[hidden]
    assert shared[hidden] == alone[hidden] / 4
    # A layer's [tokens, hidden] by hand: two norms keep an fp32 copy and two bf16 tensors each.
    assert alone[hidden] == (32 + 0.5) * 2 * (4 + 2 + 2) * TOKENS * HIDDEN


FAMILIES = {
    "llama": "meta-llama/Llama-3.1-8B",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "qwen2": "Qwen/Qwen2.5-7B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma2": "google/gemma-2-9b",
    "gemma3_text": "google/gemma-3-4b-it",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}


@pytest.mark.parametrize("family", sorted(TENSOR_PARALLEL_FAMILIES))
@pytest.mark.parametrize(
    "sizes",
    [{"tensor_parallel": 2, "sequence_parallel": True}, {"tensor_parallel": 16}],
)
def test_traced_gradients_divide_as_the_parameters_do(family: str, sizes: dict[str, int]) -> None:
    if not has_templates(family):
        pytest.skip("not traced")
    spec = resolve_model(FAMILIES[family])
    sizes = {**sizes, "expert_parallel": 2} if spec.num_experts else sizes
    (own,) = stage_specs(spec, Parallelism(**sizes))  # type: ignore[arg-type]
    workload = TrainingWorkload(attention=Attention.EAGER)
    sequence = load_steps(traced(own, workload, 4096), "kept")
    values = monomial_values(own, sequence.steps.monomials, 1, 4096)
    gradients_bytes = sum(
        values[row[1]] * row[2]
        for row in allocations(sequence.rows(Place("layer_backward", 1)))
        if COMPONENTS[row[0]] == "gradients"
    )
    assert gradients_bytes == 2 * group_numels(own).layers[1]


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-30B-A3B"]
)
def test_traced_gradients_of_experts_divide_over_the_ranks_that_split_them(name: str) -> None:
    spec = resolve_model(name)
    (own,) = stage_specs(spec, Parallelism(expert_parallel=8))
    sequence = load_steps(traced(own, TrainingWorkload(), 4096), "kept")
    values = monomial_values(own, sequence.steps.monomials, 1, 4096)
    layer = spec.num_layers // 2
    gradients_bytes = sum(
        values[row[1]] * row[2]
        for row in allocations(sequence.rows(Place("layer_backward", layer)))
        if COMPONENTS[row[0]] == "gradients"
    )
    assert gradients_bytes == 2 * group_numels(own).layers[layer]


def test_logits_divide_with_the_vocabulary() -> None:
    alone, split = step().worst, step(tensor_parallel=4).worst
    phase = "loss_backward"
    assert part(split, "logits", phase) == part(alone, "logits", phase) / 4


def test_sequence_parallel_holds_gathered_tensors_for_a_moment() -> None:
    worst = step(tensor_parallel=8, sequence_parallel=True).worst
    rows = {entry.name: entry.size_bytes for entry in worst.entries if entry.owner == "collective"}
    assert rows == {
        "input gathered over tensor-parallel GPUs": TOKENS * HIDDEN * 2,
        "gradient of the gathered input before its reduce-scatter": TOKENS * HIDDEN * 2,
    }


def test_each_stage_has_the_states_of_its_layers_and_its_end() -> None:
    stages = step(pipeline_parallel=3).stages
    own = [EMBEDDING + 11 * LAYER, 11 * LAYER, 10 * LAYER + NORM + EMBEDDING]
    assert [part(stage, "parameters") for stage in stages] == [2 * numel for numel in own]
    assert [part(stage, "optimizer") for stage in stages] == [6 * numel for numel in own]


def test_only_the_last_stage_has_logits() -> None:
    stages = step(pipeline_parallel=4).stages
    assert ["loss_backward" in stage.by_phase for stage in stages] == [False, False, False, True]
    assert part(stages[-1], "logits", "loss_backward") > 0
    assert all(part(stage, "logits", "backward_first") == 0 for stage in stages[:-1])


def test_earlier_stages_keep_more_micro_batches_in_flight() -> None:
    many = step(workload={"grad_accumulation": 8}, pipeline_parallel=4)
    assert many.in_flight == (4, 3, 2, 1)
    assert many.worst_stage == 0
    # With full checkpointing a micro-batch keeps one bf16 input per layer, and per stage tables of
    # cosines and sines [tokens, 128] and the positions in int64.
    full = step(
        workload={"grad_accumulation": 8, "checkpointing": Checkpointing.FULL}, pipeline_parallel=4
    )
    entries = {e.name: e.size_bytes for e in full.stages[1].entries if "in flight" in e.name}
    one = 8 * TOKENS * HIDDEN * 2 + 2 * TOKENS * 128 * 2 + TOKENS * 8
    assert sum(entries.values()) == 2 * one


def test_fewer_micro_batches_than_stages_bound_what_is_in_flight() -> None:
    assert step(workload={"grad_accumulation": 2}, pipeline_parallel=4).in_flight == (2, 2, 2, 1)


def test_the_note_names_the_worst_stage() -> None:
    found = step(workload={"grad_accumulation": 8}, pipeline_parallel=4)
    first, second = found.notes()
    assert first == NOT_PROVEN
    assert second.startswith("Pipeline stage 1 of 4 needs the most: layers 0 to 7, micro-batches")
    rows = found.to_dict()["stages"]
    assert [row["first_layer"] for row in rows] == [0, 8, 16, 24]
    assert rows[0]["allocated_bytes"] == found.to_dict()["allocated_bytes"]


def test_context_parallel_divides_every_activation_and_shares_what_zero_shards() -> None:
    alone, split = step().worst, step(context_parallel=4).worst
    assert part(split, "parameters") == 2 * LLAMA.parameters
    # Stage 1 cuts the optimizer over the 2 x 4 GPUs that hold the same parameters: master, moments.
    assert part(split, "optimizer") == pytest.approx(12 * LLAMA.parameters / 8, rel=1e-6)
    whole, own = kept(alone), kept(split)
    assert {shape for shape, size in own.items() if size != whole[shape] / 4} <= {()}


def test_a_ring_holds_a_received_block_of_keys_and_values() -> None:
    beside = Beside(
        spec=LLAMA,
        parallelism=Parallelism(context_parallel=4),
        itemsize=2,
        tokens=1024,
        num_others=0,
        others={},
        finds_gradients=False,
    )
    block = 1024 * 2 * 1024 * 2  # tokens, keys and values, 8 heads of 128, bf16
    assert beside.parts(Place("layer", 3)) == {"temporary": block}
    assert beside.parts(Place("layer_backward", 3)) == {"temporary": 2 * block}
    assert beside.parts(Place("loss")) == {"temporary": 0}
    without, ring = step(workload={"sequence_length": 1024}).worst, step(context_parallel=4).worst
    phase = "backward_first"
    assert part(ring, "temporary", phase) - part(without, "temporary", phase) == 2 * block


def test_expert_parallel_ranks_share_experts_and_their_states_over_fewer_ranks() -> None:
    sizes = {"world_size": 8, "expert_parallel": 4}
    worst = step(MIXTRAL, **sizes).worst
    experts = 32 * 8 * 3 * 4096 * FFN
    rest = MIXTRAL.parameters - experts
    assert part(worst, "parameters") == 2 * (rest + experts // 4)
    # Experts: a quarter over 8 / 4 ranks; the rest over 8.
    assert part(worst, "optimizer") == 12 * (rest // 8 + experts // 4 // 2)
    assert worst.formulas["optimizer"] == f"{MIXTRAL.parameters:,} parameters x 12 B / 8 ranks"
    assert worst.formulas["parameters"] == f"{rest + experts // 4:,} parameters x 2 B"


def test_expert_parallel_names_its_worst_case_apart() -> None:
    found = step(MIXTRAL, zero_stage=3, world_size=8, expert_parallel=4)
    rows = {e.name: e.size_bytes for e in found.worst.entries if e.owner == "collective"}
    assert rows == dict.fromkeys(
        ("tokens sent to experts", "tokens received by experts"), TOKENS * 2 * HIDDEN * 2
    )
    assert found.unbalanced is not None
    assert found.unbalanced.allocated_bytes > found.worst.allocated_bytes
    assert "if every token went to the experts of one rank" in found.notes()[-1]
    # Two experts a rank, two visits a token: four times the rows of the balanced case.
    balanced, crowded = (
        sum(e.size_bytes for e in memory.entries if "batch*seq*top_k" in e.shape)
        for memory in (found.worst, found.unbalanced)
    )
    assert crowded == 4 * balanced


SPLITS = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 8, "sequence_parallel": True},
    {"pipeline_parallel": 3},
    {"context_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 32, "context_parallel": 2},
]


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_ledger_and_the_components_sum_to_the_peak(sizes: dict[str, Any], stage: int) -> None:
    memory = step(workload={"grad_accumulation": 3}, zero_stage=stage, **sizes).to_dict()
    total = memory["allocated_bytes"]
    assert sum(row["bytes"] for row in memory["ledger"]) == total
    assert sum(row["bytes"] for row in memory["components"]) == total
    assert max(row["allocated_bytes"] for row in memory["phases"]) == total


@pytest.mark.parametrize("sizes", SPLITS[:-1])
@pytest.mark.parametrize(("stage", "rounds"), [(0, 1), (3, 6), (1, 2)])
def test_the_replay_holds_what_the_formulas_sum(
    sizes: dict[str, Any], stage: int, rounds: int
) -> None:
    # Blocks are whole 512 B and may keep a remainder of up to 1 MiB; else both are independent.
    workload = TrainingWorkload(micro_batch=2, grad_accumulation=rounds)
    plan = LLAMA, workload, Parallelism(zero_stage=stage, world_size=2, **sizes)
    replayed, summed = step_memory(*plan), step_memory(*plan, segment_share=0.1)
    for one, other in zip(replayed.stages, summed.stages, strict=True):
        assert one.allocated_bytes == pytest.approx(other.allocated_bytes, rel=0.005)
        assert one.overheads.reserved_bytes > one.allocated_bytes


def test_split_experts_are_replayed_with_their_own_shards() -> None:
    plan = MIXTRAL, TrainingWorkload(), Parallelism(zero_stage=1, world_size=8, expert_parallel=4)
    replayed, summed = step_memory(*plan).worst, step_memory(*plan, segment_share=0.1).worst
    assert replayed.allocated_bytes == pytest.approx(summed.allocated_bytes, rel=1e-4)


@pytest.mark.parametrize("sizes", SPLITS)
def test_a_grid_says_what_single_plans_say(sizes: dict[str, Any]) -> None:
    workload = TrainingWorkload(grad_accumulation=3)
    parallelism = Parallelism(**sizes)
    axes: dict[str, tuple[int, ...]] = {
        "zero_stages": (1, 3),
        "world_sizes": (1, 4),
        "micro_batches": (1, 2),
        "sequence_lengths": (1024, 4096),
    }
    grid = step_grid(LLAMA, workload, parallelism, segment_share=0.1, **axes)
    single = step_memory(
        LLAMA,
        replace(workload, micro_batch=2, sequence_length=1024),
        replace(parallelism, zero_stage=3, world_size=4),
        segment_share=0.1,
    ).worst
    assert grid["allocated_bytes"][1, 1, 1, 0] == single.allocated_bytes
    assert grid["device_bytes"][1, 1, 1, 0] == single.overheads.device_bytes


@pytest.mark.parametrize("sizes", SPLITS)
def test_a_prediction_says_that_it_was_not_proven(sizes: dict[str, Any]) -> None:
    plan = parse_plan(
        {
            "model": {"preset": "meta-llama/Llama-3.1-8B"},
            "parallelism": {"zero_stage": 1, "world_size": 2, **sizes},
            "hardware": {"preset": "h200"},
        }
    )
    prediction = predict(plan).to_dict()
    assert NOT_PROVEN in prediction["notes"]
    assert prediction["verdict"]["measurements"] is None


# SimuMax v1.2, docs/b200/b200_release_v1.2_summary.json: Llama3-70B's shape with 12 layers on eight
# B200, Megatron's distributed optimizer. Elements of the worst GPU by hand: a layer has 2 x 8192^2
# (q, o) + 2 x 1024 x 8192 (k, v) + 3 x 28672 x 8192 weights and two norms.
_LAYER_70B = 2 * 8192**2 + 2 * 1024 * 8192 + 3 * 28_672 * 8192
_ENDS_70B = 128_256 * 8192


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        ({"pipeline_parallel": 2}, 6 * _LAYER_70B + _ENDS_70B + 12 * 8192),
        ({"tensor_parallel": 2}, (12 * _LAYER_70B + 2 * _ENDS_70B) // 2 + 25 * 8192),
        ({"tensor_parallel": 4}, (12 * _LAYER_70B + 2 * _ENDS_70B) // 4 + 25 * 8192),
        ({"tensor_parallel": 8}, (12 * _LAYER_70B + 2 * _ENDS_70B) // 8 + 25 * 8192),
    ],
)
def test_states_of_simumax_cases(sizes: dict[str, int], parameters: int) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-70B", {"num_hidden_layers": 12})
    ranks = 8 // sizes.get("tensor_parallel", 1) // sizes.get("pipeline_parallel", 1)
    for stage in step(spec, world_size=ranks, **sizes).stages[:1]:
        assert part(stage, "parameters") == 2 * parameters
        assert part(stage, "optimizer") == pytest.approx(12 * parameters / ranks, abs=12 * 14)


def test_megatron_bytes_per_parameter_follow_from_the_same_elements() -> None:
    # Megatron-LM's documentation: 18 B per parameter, 6 + 12 / d with the distributed optimizer;
    # `mixed` keeps bf16 gradients where Megatron keeps fp32, so it has 2 B less.
    worst = step(tensor_parallel=8, world_size=4, workload={"grad_accumulation": 2}).worst
    numel = part(worst, "parameters") / 2
    states = sum(part(worst, name) for name in ("parameters", "gradients", "optimizer"))
    assert (states + 2 * numel) / numel == pytest.approx(6 + 12 / 4, abs=1e-6)
    assert states / GIB_BYTES < worst.allocated_bytes / GIB_BYTES


# SimuMax v1.2's table of long sequences (docs/b200/b200_release_v1.2_summary.md): Llama3-70B's shape with
# 12 layers and 405B's (16 key-value heads there) with 4, one data-parallel rank: layers, hidden size,
# MLP width, heads, key-value heads, tensor and context parallel, sequence length, GiB allocated.
_LONG_SEQUENCES = [
    (12, 8192, 28_672, 64, 8, 2, 4, 32_768, 68.43),
    (12, 8192, 28_672, 64, 8, 1, 8, 32_768, 104.51),
    (12, 8192, 28_672, 64, 8, 2, 4, 131_072, 112.67),
    (12, 8192, 28_672, 64, 8, 1, 8, 131_072, 147.99),
    (4, 16_384, 53_248, 128, 16, 2, 4, 32_768, 87.03),
    (4, 16_384, 53_248, 128, 16, 1, 8, 32_768, 139.22),
    (4, 16_384, 53_248, 128, 16, 2, 4, 131_072, 118.13),
]


@pytest.mark.parametrize("row", _LONG_SEQUENCES)
def test_context_parallel_gives_the_published_table(row: tuple[Any, ...]) -> None:
    layers, hidden, width, heads, kv_heads, shards, context, length, measured_gib = row
    overrides = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    found = step(
        resolve_model("meta-llama/Llama-3.1-70B", overrides),
        {"sequence_length": length, "grad_accumulation": 4},
        world_size=1,
        tensor_parallel=shards,
        sequence_parallel=shards > 1,
        context_parallel=context,
    ).worst
    tokens = length // context
    layer = 2 * hidden**2 + 2 * kv_heads * 128 * hidden + 3 * width * hidden
    other_bytes = (
        # Megatron's gradients are fp32; Transformer Engine holds one more for each shape of weight.
        part(found, "parameters")
        + 2 * (layer + 128_256 * hidden) / shards
        # Its loss keeps one bf16 copy of the logits, its norms 4 B less each, SwiGLU no active gate.
        - 10 * tokens * 128_256 / shards
        - tokens * (8 * hidden + 2 * width) / shards * layers
        # Its attention over context-parallel GPUs keeps its output before the all-to-all too.
        + 2 * tokens * hidden / shards * layers
    )
    gib = (found.allocated_bytes + other_bytes) / GIB_BYTES
    assert gib == pytest.approx(measured_gib, rel=0.005)


@pytest.mark.parametrize(
    ("sizes", "measured_gib", "ours_gib", "with_fp32_gradients_gib"),
    [
        ({"pipeline_parallel": 2, "world_size": 4}, 66.55, 59.30, 70.82),
        ({"tensor_parallel": 2, "world_size": 4}, 60.68, 52.67, 64.19),
        ({"tensor_parallel": 4, "world_size": 2}, 39.07, 35.07, 40.83),
        ({"tensor_parallel": 8, "world_size": 1}, 28.29, 26.27, 29.15),
    ],
)
def test_simumax_peaks_lie_between_ours_and_ours_with_megatrons_gradients(
    sizes: dict[str, int], measured_gib: float, ours_gib: float, with_fp32_gradients_gib: float
) -> None:
    # The table of docs/memory-model.md, with what explains the differences.
    spec = resolve_model("meta-llama/Llama-3.1-70B", {"num_hidden_layers": 12})
    is_tensor = "tensor_parallel" in sizes
    found = step(spec, {"grad_accumulation": 8}, sequence_parallel=is_tensor, **sizes).worst
    assert found.allocated_bytes / GIB_BYTES == pytest.approx(ours_gib, abs=0.006)
    more_bytes = part(found, "parameters")  # 2 B per parameter, as many as bf16 weights
    more_gib = (found.allocated_bytes + more_bytes) / GIB_BYTES
    assert more_gib == pytest.approx(with_fp32_gradients_gib, abs=0.006)
    assert ours_gib < measured_gib < with_fp32_gradients_gib


# Korthikanti et al. 2022 as encoded in Calculon (calculon/llm/validation.py), sequence length 2048: hidden
# size, heads, layers, tensor and pipeline parallel, micro-batch, and the interleave factor of their
# schedule; then activations in GiB and, in percent of tensor parallelism alone, with sequence
# parallelism, without stored scores, with both.
_KORTHIKANTI = [
    (6144, 64, 48, 8, 1, 4, 1.0, 59.25, 9.5625, (66.84, 49.42, 16.18)),
    (12_288, 96, 96, 8, 8, 1, 1 + 7 / 24, 66.84375, 12.3515625, (62.04, 56.53, 18.49)),
    (20_480, 128, 105, 8, 35, 1, 1 + 34 / 105, 114.0234, 23.0762, (58.31, 62.04, 20.27)),
    (25_600, 160, 128, 8, 64, 1, 1.0, 131.25, 26.5625, (58.31, 62.04, 20.27)),
]
# Bytes that a GPT layer keeps per element of these: norms' inputs 4, their outputs 4, masks of two
# dropouts 2; queries, keys, values and attention's output 8; MLP inner 16/4; scores, softmax and mask 5.
_GPT_KEEPS = {
    "batch*seq*hidden": 10,
    "batch*seq*kv_heads*group*half_head_dim": 2 * 8,
    "batch*seq*ffn": 4,
    "batch*seq*seq*kv_heads*group": 5,
}


@pytest.mark.parametrize("row", _KORTHIKANTI, ids=["22B", "175B", "530B", "1T"])
def test_activations_divide_as_in_korthikantis_table(row: tuple[Any, ...]) -> None:
    hidden, heads, layers, shards, stages, batch, interleave, gib, both_gib, percent = row
    overrides = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "num_hidden_layers": layers,
        "vocab_size": 51_200,
    }
    spec = resolve_model("meta-llama/Llama-3.1-8B", overrides)
    keeps = tuple(_GPT_KEEPS)

    def first_stage_gib(sequence_parallel: bool, keeps_scores: bool) -> float:
        parallelism = Parallelism(
            tensor_parallel=shards, pipeline_parallel=stages, sequence_parallel=sequence_parallel
        )
        own = stage_specs(spec, parallelism)[0]
        flying = in_flight(TrainingWorkload(grad_accumulation=stages), parallelism, 0)
        values = monomial_values(own, keeps, batch, 2048)
        sizes = [v * _GPT_KEEPS[m] for m, v in zip(keeps, values, strict=True)]
        kept_bytes = sum(sizes if keeps_scores else sizes[:-1])
        return float(kept_bytes * own.num_layers * flying * interleave / GIB_BYTES)

    assert first_stage_gib(False, True) == pytest.approx(gib, rel=1e-6)
    assert first_stage_gib(True, False) == pytest.approx(both_gib, rel=1e-5)
    choices = ((True, True), (False, False), (True, False))
    found = [100 * first_stage_gib(*choice) / first_stage_gib(False, True) for choice in choices]
    assert found == pytest.approx(percent, abs=0.15)
