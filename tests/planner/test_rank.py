"""One GPU's part of a model: its dimensions and its parameters, against counts by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from planner.families import parameter_shapes
from planner.memory.parallel import in_flight, layers_per_stage, rank_workload, stage_specs
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.rank import RankSpec
from planner.splits import TENSOR_PARALLEL_FAMILIES
from planner.units import GIB_BYTES
from planner.workload import Parallelism, TrainingWorkload

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
MIXTRAL = resolve_model("mistralai/Mixtral-8x7B-v0.1")
P, EMBEDDING, NORM = 8_030_261_248, 128_256 * 4096, 4096
LAYER = (P - 2 * EMBEDDING - NORM) // 32


def part(spec: ModelSpec, stage: int = 0, **sizes: int | bool) -> RankSpec:
    """Return the part of one GPU in a pipeline's stage."""
    found = stage_specs(spec, Parallelism(**sizes))[stage]  # type: ignore[arg-type]
    assert isinstance(found, RankSpec)
    return found


def test_a_model_that_nothing_splits_stays_itself() -> None:
    assert stage_specs(LLAMA, Parallelism(zero_stage=3, world_size=64)) == (LLAMA,)


def test_tensor_parallel_gpus_share_heads_width_and_vocabulary_but_not_norms() -> None:
    half = part(LLAMA, tensor_parallel=2)
    assert (half.num_heads, half.num_kv_heads, half.head_dim) == (16, 4, 128)
    assert (half.intermediate_size, half.vocab_size, half.hidden_size) == (7168, 64_128, 4096)
    norms = 65 * NORM
    assert half.parameters == (P - norms) // 2 + norms


def test_more_gpus_than_key_value_heads_keep_one_each() -> None:
    sixteenth = part(LLAMA, tensor_parallel=16)
    assert (sixteenth.num_heads, sixteenth.num_kv_heads) == (2, 1)
    # q and o divide by 16; of k and v, one head of 128 columns each stays.
    shapes = {p.name.split(".")[-2]: p.shape for p in parameter_shapes(sixteenth)}
    assert shapes["q_proj"] == (256, 4096)
    assert shapes["k_proj"] == shapes["v_proj"] == (128, 4096)
    assert shapes["o_proj"] == (4096, 256)


@pytest.mark.parametrize(
    "name",
    [
        *("meta-llama/Llama-3.1-8B", "mistralai/Mistral-7B-v0.3", "Qwen/Qwen2.5-7B"),
        *("Qwen/Qwen3-8B", "google/gemma-2-9b"),
        *("google/gemma-3-4b-it", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"),
    ],
)
def test_every_matrix_divides_but_a_router(name: str) -> None:
    spec = resolve_model(name)
    assert spec.family in TENSOR_PARALLEL_FAMILIES
    pairs = zip(
        parameter_shapes(spec), parameter_shapes(part(spec, tensor_parallel=2)), strict=True
    )
    for whole, half in pairs:
        is_matrix = len(whole.shape) > 1 and not whole.name.endswith("mlp.gate.weight")
        shares = {Fraction(1, 2)} if is_matrix else {Fraction(1, 2), Fraction(1)}
        assert Fraction(half.numel, whole.numel) in shares, whole.name


def test_pipeline_stages_hold_their_layers_and_their_end_of_the_model() -> None:
    assert layers_per_stage(32, 3) == [11, 11, 10]
    stages = [part(LLAMA, stage, pipeline_parallel=3) for stage in range(3)]
    assert [stage.parameters for stage in stages] == [
        EMBEDDING + 11 * LAYER,
        11 * LAYER,
        10 * LAYER + NORM + EMBEDDING,
    ]
    assert [stage.runs("embed_backward") for stage in stages] == [True, False, False]
    assert [stage.runs("loss") for stage in stages] == [False, False, True]
    assert all(stage.runs("layer_backward") for stage in stages)


def test_both_ends_of_a_pipeline_hold_a_copy_of_a_tied_weight() -> None:
    tied = resolve_model("meta-llama/Llama-3.2-1B")
    whole = sum(part(tied, stage, pipeline_parallel=2).parameters for stage in range(2))
    assert whole == tied.parameters + tied.vocab_size * tied.hidden_size


def test_stages_keep_the_pattern_of_their_layers() -> None:
    gemma = resolve_model("google/gemma-3-1b-it")
    stages = [part(gemma, stage, pipeline_parallel=4) for stage in range(4)]
    assert [stage.num_layers for stage in stages] == [7, 7, 6, 6]
    assert sum((stage.sliding_layers for stage in stages), ()) == gemma.sliding_layers


def test_one_forward_one_backward_keeps_as_many_micro_batches_as_stages_follow() -> None:
    parallelism = Parallelism(pipeline_parallel=4)
    many, two = TrainingWorkload(grad_accumulation=16), TrainingWorkload(grad_accumulation=2)
    assert [in_flight(many, parallelism, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(two, parallelism, stage) for stage in range(4)] == [2, 2, 2, 1]


def test_expert_parallel_ranks_share_experts_but_not_their_router() -> None:
    quarter = part(MIXTRAL, expert_parallel=4)
    experts = 32 * 8 * 3 * 4096 * 14_336
    assert quarter.parameters == MIXTRAL.parameters - experts * 3 // 4
    both = part(MIXTRAL, expert_parallel=4, tensor_parallel=2)
    rest = MIXTRAL.parameters - experts
    whole = 65 * 4096 + 32 * 8 * 4096  # norms and routers
    assert both.parameters == experts // 8 + (rest - whole) // 2 + whole


def test_a_stage_of_deepseek_v3_holds_what_zhang_and_su_print() -> None:
    # "Memory Analysis on the Training Course of DeepSeek Models" (arXiv 2502.07846), section 3 and table 6:
    # four layers of experts, each divided over 8 ranks; a shared expert and the router on all.
    spec = resolve_model("deepseek-ai/DeepSeek-V3")
    stage = part(spec, 1, pipeline_parallel=16, expert_parallel=8)
    assert stage.num_layers == 4 and all(stage.expert_layers)
    shapes = parameter_shapes(stage)
    mixture = sum(p.total_numel for p in shapes if ".mlp." in p.name)
    norms = sum(p.total_numel for p in shapes if "norm" in p.name)
    assert (mixture, norms) == (5_820_645_376, 65_536)
    # Their section 3.2 at one tensor-parallel GPU: 318,767,104 x 2 that divide and 110,886,912 that do not.
    assert stage.parameters - mixture - norms == 2 * 318_767_104 + 110_886_912


def test_context_parallel_gpus_share_the_tokens() -> None:
    workload = TrainingWorkload(sequence_length=8192, micro_batch=3)
    shared = rank_workload(workload, Parallelism(context_parallel=4))
    assert (shared.sequence_length, shared.micro_batch) == (2048, 3)


def test_sequence_parallel_shares_tokens_times_hidden_size_and_nothing_else() -> None:
    eighth = part(LLAMA, tensor_parallel=8, sequence_parallel=True)
    assert eighth.share_of("batch*seq*hidden") == 1 / 8
    for monomial in ("batch*seq*ffn", "batch*seq*vocab", "hidden", "hidden*ffn", "batch*seq", ""):
        assert eighth.share_of(monomial) == 1
    quarter = part(MIXTRAL, expert_parallel=4)
    assert quarter.share_of("ffn*experts*hidden") == 1 / 4
    assert quarter.share_of("experts*hidden") == quarter.share_of("batch*seq*experts") == 1


# Korthikanti et al. 2022, table 3, as encoded in Calculon: parameters and optimizer of one GPU at
# 18 bytes each (bf16 weight, fp32 gradient, master, two moments), 12 h^2 weights a layer. A gated
# MLP of 8h/3 has as many weights as the paper's of 4h.
@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "sizes", "gib"),
    [
        (6144, 64, 48, {"tensor_parallel": 8}, 45.5625),
        (12_288, 96, 96, {"tensor_parallel": 8, "pipeline_parallel": 8}, 45.5625),
    ],
)
def test_korthikanti_table_of_parameters_and_optimizer(
    hidden: int, heads: int, layers: int, sizes: dict[str, int], gib: float
) -> None:
    overrides = {
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "num_hidden_layers": layers,
        "vocab_size": 51_200,
    }
    spec = resolve_model("meta-llama/Llama-3.1-8B", overrides)
    for stage in stage_specs(spec, Parallelism(**sizes)):  # type: ignore[arg-type]
        weights = sum(
            p.total_numel
            for p in parameter_shapes(stage)
            if p.group == "layer" and len(p.shape) == 2
        )
        assert weights * 18 / GIB_BYTES == gib
