"""FSDP2 as Python: the calls of torch.distributed.fsdp that shard a model as the plan says.

The units are those that the planner counts: every decoder layer, and the rest of the model.
"""

from __future__ import annotations

from planner.export.target import (
    Draft,
    ExportFile,
    Target,
    refuse,
    refuse_splits,
    training,
)
from planner.plan import Plan
from planner.workload import (
    Checkpointing,
    Engine,
    Optimizer,
    Precision,
    ReduceDtype,
    TrainingWorkload,
)

FILE = "shard.py"
_OPTIMIZERS = {
    Optimizer.ADAMW_FUSED: "torch.optim.AdamW(parameters, lr=lr, fused=True)",
    Optimizer.ADAMW_FOREACH: "torch.optim.AdamW(parameters, lr=lr, foreach=True)",
    Optimizer.ADAMW_LOOP: "torch.optim.AdamW(parameters, lr=lr, foreach=False, fused=False)",
    Optimizer.SGD: "torch.optim.SGD(parameters, lr=lr, momentum=0.9)",
}
_TEXT = '''"""Exported by Peakmark: shards a Hugging Face model with FSDP2, as ZeRO stage {stage}."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's list of layers, the outermost of its lists."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def shard(model: nn.Module, device: str = "cuda") -> None:
    """Shard over all ranks: every layer is a unit, and the rest of the model is one."""
    model.to({model_dtype})
{checkpointing}    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy({policy})
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard})
    fully_shard(model, mesh=mesh, mp_policy=policy)
{optimizer}'''
_OPTIMIZER = '''

def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make the plan's optimizer: after `shard`, so that it holds shards."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {call}
'''
_CLIPPING = '''

def clip_gradients(model: nn.Module) -> None:
    """Clip to the plan's norm: after the backward, before the step."""
    nn.utils.clip_grad_norm_(model.parameters(), {norm!r})
'''
_CHECKPOINTING = (
    '    model.gradient_checkpointing_enable({"use_reentrant": False})\n'
    "    for index, layer in enumerate(decoder_layers(model)):\n"
    "        layer.gradient_checkpointing = index %s %d == 0\n"
)


def fsdp2_draft(plan: Plan) -> Draft:
    """Write the Python file; raises PlanError for stages 0 and 1, splits, and serving plans."""
    workload = training(plan, Target.FSDP2)
    refuse_splits(plan, Target.FSDP2)
    stage = plan.parallelism.zero_stage
    if stage not in (2, 3):
        why = "FSDP2 shards as ZeRO stage 2 or 3; take one of them, or export to deepspeed"
        raise refuse(Target.FSDP2, "parallelism.zero_stage", stage, why)
    return Draft(
        files=(ExportFile(name=FILE, text=_text(workload, stage), language="python"),),
        holds=frozenset(_holds(workload)),
        notes=(
            *_engine_note(plan),
            f"The file shards over as many ranks as are started: {plan.parallelism.world_size:,} of the "
            "plan (torchrun or sbatch export).",
        ),
    )


def _text(workload: TrainingWorkload, stage: int) -> str:
    call = _OPTIMIZERS.get(workload.optimizer)
    made = "" if call is None else _OPTIMIZER.format(call=call)
    clipped = _CLIPPING.format(norm=workload.max_grad_norm) if workload.max_grad_norm else ""
    is_full = workload.checkpointing is Checkpointing.FULL
    return _TEXT.format(
        stage=stage,
        model_dtype="torch.bfloat16" if workload.precision is Precision.BF16 else "torch.float32",
        checkpointing=_CHECKPOINTING % ("%", workload.checkpoint_every) if is_full else "",
        policy=_policy(workload),
        reshard=stage == 3,
        optimizer=made + clipped,
    )


def _policy(workload: TrainingWorkload) -> str:
    reduced = {ReduceDtype.BF16: "torch.bfloat16", ReduceDtype.FP32: "torch.float32"}.get(
        workload.reduce_dtype
    )
    if workload.precision is Precision.MIXED:
        return f"param_dtype=torch.bfloat16, reduce_dtype={reduced or 'torch.float32'}"
    return f"reduce_dtype={reduced}" if reduced else ""


def _holds(workload: TrainingWorkload) -> set[str]:
    found = {"engine", "zero_stage", "world_size", "reduce_dtype", "max_grad_norm"}
    # Autocast surrounds the forward, which is the script's.
    found |= set() if workload.precision is Precision.AUTOCAST else {"precision"}
    found |= {"optimizer"} if workload.optimizer in _OPTIMIZERS else set()
    is_full = workload.checkpointing is Checkpointing.FULL
    return found | ({"checkpointing", "checkpoint_every"} if is_full else set())


def _engine_note(plan: Plan) -> tuple[str, ...]:
    if plan.parallelism.engine is Engine.FSDP2:
        return ()
    return (
        f"The plan is of engine {plan.parallelism.engine}: FSDP2's memory and speed are others at the "
        "same stage; plan with engine fsdp2 to see them.",
    )
