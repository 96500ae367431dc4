"""Training variants that cannot be combined with an engine or a model, each with its sentence."""

from __future__ import annotations

from planner.errors import PlanError
from planner.workload import Engine, Loss, Optimizer, Parallelism, TrainingWorkload

_WHOLE_MATRIX = (Optimizer.ADAFACTOR, Optimizer.MUON)

# Engines that step every parameter in its own shape, whatever the stage.
_WHOLE_PARAMETERS = (Engine.DDP, Engine.ZERO_REDUNDANCY)


def check_variants(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Raise PlanError where a variant does not work under the engine; the sentence says why."""
    _check_optimizer(workload.optimizer, parallelism)
    _check_loss(workload.loss, parallelism)
    _check_sync(workload, parallelism)


def _check_optimizer(optimizer: Optimizer, parallelism: Parallelism) -> None:
    engine, stage = parallelism.engine, parallelism.zero_stage
    if optimizer is Optimizer.ADAMW_8BIT and engine not in (Engine.PEAKMARK, Engine.DDP):
        raise _refused(optimizer, f"bitsandbytes cannot step the tensors of {engine}")
    if engine in _WHOLE_PARAMETERS:
        return
    if optimizer in _WHOLE_MATRIX and engine is not Engine.PEAKMARK:
        raise _refused(optimizer, f"it needs whole matrices and does not run under {engine}")
    if optimizer in _WHOLE_MATRIX and stage > 0:
        sentence = (
            f"parallelism.zero_stage is {stage}: {optimizer} reads rows and columns of whole "
            "matrices, which stages 1 to 3 cut; use stage 0."
        )
        raise PlanError("parallelism.zero_stage", stage, "0", sentence=sentence)


def _check_loss(loss: Loss, parallelism: Parallelism) -> None:
    if loss is not Loss.HF and parallelism.tensor_parallel > 1:
        sentence = (
            f"workload.loss is '{loss}': it reads the whole vocabulary, which tensor parallelism "
            "splits; use hf."
        )
        raise PlanError("workload.loss", str(loss), "hf", sentence=sentence)


def _check_sync(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    engine = parallelism.engine
    if not workload.sync_each_micro_batch and engine is Engine.DEEPSPEED:
        sentence = (
            "workload.sync_each_micro_batch is false: what accumulation without reduction keeps is "
            f"not predicted for {engine}; use true, or another engine."
        )
        raise PlanError("workload.sync_each_micro_batch", False, "true", sentence=sentence)


def _refused(optimizer: Optimizer, reason: str) -> PlanError:
    sentence = f"workload.optimizer is '{optimizer}': {reason}; use engine peakmark."
    return PlanError("workload.optimizer", str(optimizer), "engine peakmark", sentence=sentence)
