"""What each engine can do: its ZeRO stages, precisions and optimizers, and why not others."""

from __future__ import annotations

from typing import NamedTuple

from planner.errors import PlanError
from planner.workload import Engine, Optimizer, Parallelism, Precision, TrainingWorkload


class _Rules(NamedTuple):
    """What an engine has, each with the reason that others are refused."""

    stages: tuple[int, ...]
    stages_reason: str = ""
    precisions: tuple[Precision, ...] = tuple(Precision)
    precisions_reason: str = ""
    refused_optimizers: tuple[Optimizer, ...] = ()
    optimizers_reason: str = ""


# planner/variants.py refuses these where parameters are not stepped in our engine's flat shards.
_FLAT_ONLY = (Optimizer.ADAMW_TRITON, Optimizer.ADAMW_8BIT)
_NO_MASTER = "keeps no fp32 master weights beside 16-bit parameters"
_STOCK = (Precision.BF16, Precision.FP32, Precision.AUTOCAST)
_RULES = {
    Engine.PEAKMARK: _Rules((0, 1, 2, 3)),
    Engine.FSDP2: _Rules(
        (2, 3),
        "shards gradients and optimizer states always, so it has stage 2 (parameters kept after "
        "the forward) and stage 3 only",
    ),
    Engine.DDP: _Rules(
        (0,),
        "shards nothing, so it has stage 0 only",
        _STOCK,
        f"DistributedDataParallel {_NO_MASTER}",
    ),
    Engine.ZERO_REDUNDANCY: _Rules(
        (1,),
        "shards the optimizer alone, so it has stage 1 only",
        _STOCK,
        f"ZeroRedundancyOptimizer {_NO_MASTER}",
        (Optimizer.MUON,),
        "ZeroRedundancyOptimizer wraps one optimizer, muon needs AdamW besides",
    ),
    Engine.DEEPSPEED: _Rules(
        (1, 2, 3),
        "runs here as ZeRO, so it has the stages 1, 2 and 3",
        (Precision.MIXED,),
        "DeepSpeed's bf16 keeps fp32 master weights always, which is mixed",
    ),
}


def check_stage(parallelism: Parallelism) -> None:
    """Raise PlanError where the engine has no such stage."""
    stage, rules = parallelism.zero_stage, _RULES[parallelism.engine]
    if stage not in rules.stages:
        sentence = f"parallelism.zero_stage is {stage}: {parallelism.engine} {rules.stages_reason}."
        raise PlanError("parallelism.zero_stage", stage, _words(rules.stages), sentence=sentence)


def check_engine(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Raise PlanError for a precision or an optimizer that the engine has not."""
    rules, engine = _RULES[parallelism.engine], parallelism.engine
    precision, optimizer = workload.precision, workload.optimizer
    if precision not in rules.precisions:
        allowed = _words(rules.precisions)
        sentence = (
            f"workload.precision is '{precision}': {rules.precisions_reason}; with engine {engine} "
            f"use {allowed}."
        )
        raise PlanError("workload.precision", str(precision), allowed, sentence=sentence)
    if optimizer in rules.refused_optimizers:
        left_out = (*rules.refused_optimizers, *_FLAT_ONLY)
        others = _words([other for other in Optimizer if other not in left_out])
        sentence = (
            f"workload.optimizer is '{optimizer}': {rules.optimizers_reason}; with engine {engine} "
            f"use {others}."
        )
        raise PlanError("workload.optimizer", str(optimizer), others, sentence=sentence)


def engine_notes(parallelism: Parallelism) -> tuple[str, ...]:
    """Say what a prediction assumes of an engine that is not ours."""
    stage = parallelism.zero_stage
    if parallelism.engine is Engine.ZERO_REDUNDANCY:
        return (
            "ZeroRedundancyOptimizer deals out whole parameters: rank 0 holds the states of the "
            "largest, however many GPUs there are.",
        )
    if parallelism.engine is not Engine.DEEPSPEED:
        return ()
    first = (
        "Its first two micro-batches, in which it learns the order of modules, take less."
        if stage == 3
        else "Its first step, without optimizer states, takes less."
    )
    return (
        "DeepSpeed 0.19 with default buckets (5e8 elements) is predicted for its steady state. "
        f"{first} What reducing a bucket takes is counted at the end of a layer's backward.",
    )


def _words(choices: list[Optimizer] | tuple[object, ...]) -> str:
    *first, last = (str(choice) for choice in choices)
    return f"{', '.join(first)} or {last}" if first else last
