"""The plans and attention problems that claims are tried on, and the planner's answers to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.attention.answer import VariantAnswer, answer
from planner.attention.of_plan import problem_of_plan
from planner.attention.problem import AttentionProblem, Variant
from planner.errors import PlanError
from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.stages import step_memory
from planner.obstacles import check_training
from planner.plan import Plan, parse_plan
from planner.predict import Prediction, predict
from planner.workload import Attention, TrainingWorkload

H200, A100_80, A100_40, RTX_3090 = (
    *("h200-sxm5-141gb", "a100-sxm4-80gb", "a100-sxm4-40gb"),
    "rtx-3090",
)
LLAMA_8B: Mapping[str, Any] = {"preset": "meta-llama/Llama-3.1-8B"}
LLAMA_1B: Mapping[str, Any] = {"preset": "meta-llama/Llama-3.2-1B"}
LLAMA_3B: Mapping[str, Any] = {"preset": "meta-llama/Llama-3.2-3B"}
# GPT-2 with a longer table of positions: the size of a summariser.
SUMMARISER: Mapping[str, Any] = {
    "preset": "openai-community/gpt2",
    "overrides": {"max_position_embeddings": 8192},
}
# DNA has a few letters, so its logits are small.
DNA_1B: Mapping[str, Any] = {**LLAMA_1B, "overrides": {"vocab_size": 512}}
# Touvron et al., LLaMA (arXiv 2302.13971), table 2; widths and vocabulary as in its checkpoints.
LLAMA_65B: Mapping[str, Any] = {
    "name": "LLaMA-65B",
    "config": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}
LENGTH_STEP_TOKENS, MAX_LENGTH_TOKENS = 256, 2**20


def training_plan(
    model: Mapping[str, Any], gpu: str, spread: Mapping[str, Any] | None = None, **workload: Any
) -> Plan:
    """Return a checked training plan; without `spread` on one GPU without ZeRO."""
    alone = {"engine": "peakmark", "zero_stage": 0, "world_size": 1}
    return parse_plan(
        {
            "model": dict(model),
            "hardware": {"preset": gpu},
            "workload": workload,
            "parallelism": dict(spread or alone),
        }
    )


def eight_ranks(zero_stage: int = 3) -> dict[str, Any]:
    """Return the spread over eight data-parallel ranks of our engine."""
    return {"engine": "peakmark", "zero_stage": zero_stage, "world_size": 8}


def llama_8b(tokens: int, checkpointing: str = "none") -> Plan:
    """Return Llama-3.1-8B, ZeRO-3 on eight H200: the plan of most claims about a training step."""
    return training_plan(
        LLAMA_8B, H200, eight_ranks(), sequence_length=tokens, checkpointing=checkpointing
    )


def training_of(plan: Plan) -> TrainingWorkload:
    """Return a plan's training workload; raises PlanError for a serving plan."""
    if isinstance(plan.workload, TrainingWorkload):
        return plan.workload
    raise PlanError("job", str(plan.job), "train, as this claim is about training")


def with_attention(plan: Plan, attention: Attention) -> Plan:
    """Return the plan with another kernel; raises PlanError where its model cannot have it."""
    workload = replace(training_of(plan), attention=attention)
    check_training(plan.model, workload, plan.parallelism)
    return replace(plan, workload=workload)


@lru_cache(maxsize=256)
def prediction(plan: Plan) -> Prediction:
    """Return the planner's prediction, kept per plan."""
    return predict(plan)


def peak_bytes(plan: Plan) -> int:
    """Return the allocated peak of a training step."""
    return int(prediction(plan).memory["allocated_bytes"])


def needed_bytes(plan: Plan) -> int:
    """Return the device bytes of a training step, which the GPU must have."""
    return int(prediction(plan).memory["device_bytes"])


def step_s(plan: Plan) -> float:
    """Return the predicted time of a step."""
    return prediction(plan).throughput.step_time_s


def memory_factor(plan: Plan) -> float:
    """Return how many times less a step's peak is with sdpa than with eager attention."""
    eager, fused = (with_attention(plan, kind) for kind in (Attention.EAGER, Attention.SDPA))
    return peak_bytes(eager) / peak_bytes(fused)


def speed_factor(plan: Plan) -> float:
    """Return how many times faster a step is with sdpa than with eager attention."""
    eager, fused = (with_attention(plan, kind) for kind in (Attention.EAGER, Attention.SDPA))
    return step_s(eager) / step_s(fused)


@lru_cache(maxsize=64)
def longest_step(plan: Plan) -> int:
    """Return the longest sequence, in steps of 256 tokens up to 2^20, whose training step fits.

    Segments count with the typical share of the allocated peak, as `planner.search` does.
    """

    def fits(steps: int) -> bool:
        workload = replace(training_of(plan), sequence_length=steps * LENGTH_STEP_TOKENS)
        memory = step_memory(
            plan.model, workload, plan.parallelism, plan.hardware, TYPICAL_SEGMENT_SHARE
        )
        return int(memory.to_dict()["device_bytes"]) <= plan.hardware.visible_bytes

    low, high = 0, MAX_LENGTH_TOKENS // LENGTH_STEP_TOKENS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * LENGTH_STEP_TOKENS


def attention_of(plan: Plan, **changes: Any) -> AttentionProblem:
    """Return one layer's attention of a plan with changes; raises PlanError."""
    return problem_of_plan(plan, changes)


@lru_cache(maxsize=128)
def variant_of(plan: Plan, problem: AttentionProblem, variant: Variant) -> VariantAnswer:
    """Return what a variant of a problem costs on the plan's GPU; raises PlanError where it cannot."""
    found = answer(problem, (variant,), plan.hardware)
    if not found.variants:
        sentence = found.refused[variant.value]
        raise PlanError("attention.kernels", variant.value, "one that can run", sentence=sentence)
    return found.variants[0]
