"""Training variants that cannot be combined with an engine or a model, each with its sentence."""

from __future__ import annotations

from planner.errors import PlanError
from planner.model import ModelSpec
from planner.workload import (
    BaseDtype,
    Engine,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    ReduceDtype,
    TrainingWorkload,
)

_FP32_STEPS = (Precision.MIXED, Precision.FP32, Precision.AUTOCAST)
_WHOLE_MATRIX = (Optimizer.ADAFACTOR, Optimizer.MUON)

# Engines that step every parameter in its own shape, whatever the stage.
_WHOLE_PARAMETERS = (Engine.DDP, Engine.ZERO_REDUNDANCY)


def check_variants(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Raise PlanError where a variant does not work under the engine; the sentence says why."""
    _check_optimizer(workload, parallelism)
    _check_loss(workload.loss, parallelism)
    _check_sync(workload, parallelism)
    _check_trained(model, workload, parallelism)
    _check_offload(workload, parallelism)
    _check_reduction(workload, parallelism)
    _check_base(workload, parallelism)


def _check_kernel(workload: TrainingWorkload, engine: Engine) -> None:
    """Refuse our own AdamW kernel where its flat fp32 shards are not."""
    optimizer, precision = workload.optimizer, workload.precision
    if engine is not Engine.PEAKMARK:
        raise _refused(optimizer, f"it steps our engine's flat shards, which {engine} has not")
    if precision not in _FP32_STEPS:
        sentence = (
            f"workload.optimizer is '{optimizer}': it steps fp32 values, which precision {precision} "
            "has not; use mixed, fp32 or autocast, or adamw_fused."
        )
        raise PlanError("workload.optimizer", str(optimizer), "adamw_fused", sentence=sentence)


def _check_optimizer(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    optimizer = workload.optimizer
    engine, stage = parallelism.engine, parallelism.zero_stage
    if optimizer is Optimizer.ADAMW_TRITON:
        _check_kernel(workload, engine)
    if optimizer is Optimizer.ADAMW_8BIT and engine not in (Engine.PEAKMARK, Engine.DDP):
        raise _refused(optimizer, f"bitsandbytes cannot step the tensors of {engine}")
    if engine in _WHOLE_PARAMETERS:
        return
    if optimizer in _WHOLE_MATRIX and engine is not Engine.PEAKMARK:
        raise _refused(optimizer, f"it needs whole matrices and does not run under {engine}")
    if optimizer in _WHOLE_MATRIX and parallelism.tensor_parallel > 1:
        shards = parallelism.tensor_parallel
        sentence = (
            f"parallelism.tensor_parallel is {shards}: {optimizer} reads rows and columns of whole "
            "matrices, which tensor parallelism cuts; use 1, or an adamw optimizer or sgd."
        )
        raise PlanError("parallelism.tensor_parallel", shards, "1", sentence=sentence)
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


def _check_trained(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Refuse adapters and frozen layers where they are not predicted."""
    rank, frozen = workload.lora_rank, workload.frozen_layers
    if rank < 0:
        raise PlanError("workload.lora_rank", rank, "0 or more")
    if not 0 <= frozen < model.num_layers:
        raise PlanError("workload.frozen_layers", frozen, f"0 to {model.num_layers - 1}")
    if not rank and not frozen:
        return
    field, value = ("lora_rank", rank) if rank else ("frozen_layers", frozen)
    reason, allowed = None, "0"
    if rank and frozen:
        reason = "adapters freeze the whole model already, so frozen layers add nothing"
        allowed = f"0, or workload.frozen_layers 0 instead of {frozen}"
    elif parallelism.engine is Engine.DEEPSPEED:
        reason = "training a part of a model is not predicted for deepspeed"
        allowed = "0, or engine peakmark, fsdp2 or ddp"
    elif workload.optimizer in _WHOLE_MATRIX:
        reason = f"{workload.optimizer} is predicted for whole models only"
        allowed = "0, or adamw or sgd"
    elif _is_split(parallelism):
        reason = "training a part of a split model is not predicted"
        allowed = "0, or data parallelism alone"
    if reason is not None:
        sentence = f"workload.{field} is {value}: {reason}; use {allowed}."
        raise PlanError(f"workload.{field}", value, allowed, sentence=sentence)


def _check_offload(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Refuse an optimizer in host memory where our engine does not step it there."""
    if not workload.offload_optimizer:
        return
    reason = None
    if parallelism.engine is not Engine.PEAKMARK:
        reason = (
            f"what {parallelism.engine} keeps on the host is not predicted; use engine peakmark"
        )
    elif parallelism.zero_stage == 0:
        reason = "stage 0 shards no optimizer; use ZeRO stage 1, 2 or 3"
    elif workload.optimizer is not Optimizer.ADAMW_FUSED:
        reason = f"{workload.optimizer} is not stepped on the host; use adamw_fused"
    elif workload.precision is Precision.BF16:
        reason = "bf16 has no fp32 values to step there; use mixed, fp32 or autocast"
    elif _is_split(parallelism):
        reason = "it is predicted for data parallelism only; leave the model whole"
    if reason is not None:
        sentence = f"workload.offload_optimizer is true: {reason}, or set it to false."
        raise PlanError("workload.offload_optimizer", True, "false", sentence=sentence)


def _check_reduction(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Refuse a dtype of the reduction where the engine or the precision leaves no choice."""
    chosen, engine = workload.reduce_dtype, parallelism.engine
    if chosen is ReduceDtype.AUTO:
        return
    reason = None
    if engine not in (Engine.PEAKMARK, Engine.FSDP2):
        reason = f"{engine} reduces gradients in a dtype of its own"
    elif workload.precision not in (Precision.MIXED, Precision.BF16):
        reason = f"with precision {workload.precision} gradients are made and reduced in fp32"
    elif workload.offload_optimizer:
        reason = "an optimizer in host memory takes gradients as they are made"
    elif _is_split(parallelism):
        reason = "for a split model it is not predicted"
    if reason is not None:
        sentence = f"workload.reduce_dtype is '{chosen}': {reason}; use auto."
        raise PlanError("workload.reduce_dtype", str(chosen), "auto", sentence=sentence)


def _check_base(workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Refuse 4-bit weights that are trained, or that an engine would have to cut."""
    if workload.base_dtype is not BaseDtype.NF4:
        return
    lacking = [] if workload.lora_rank else ["set workload.lora_rank"]
    if parallelism.engine not in _WHOLE_PARAMETERS:
        lacking.append("take engine ddp (ZeRO stage 0) or zero_redundancy (stage 1)")
    if not lacking:
        return
    reason = "4-bit weights lie below adapters, whole on every rank"
    allowed = f"as_precision, or {' and '.join(lacking)}"
    sentence = f"workload.base_dtype is 'nf4': {reason}; use {allowed}."
    raise PlanError("workload.base_dtype", "nf4", allowed, sentence=sentence)


def _is_split(parallelism: Parallelism) -> bool:
    degrees = (
        *(parallelism.tensor_parallel, parallelism.pipeline_parallel),
        *(parallelism.context_parallel, parallelism.expert_parallel),
    )
    return max(degrees) > 1


def _refused(optimizer: Optimizer, reason: str) -> PlanError:
    sentence = f"workload.optimizer is '{optimizer}': {reason}; use engine peakmark."
    return PlanError("workload.optimizer", str(optimizer), "engine peakmark", sentence=sentence)
