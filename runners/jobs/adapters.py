"""Which parameters of a model are trained: low-rank adapters, or all but its first layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.memory.adapters import target_names
from planner.workload import BaseDtype, TrainingWorkload
from runners.engines.four_bit import store_in_four_bits
from runners.zero.groups import decoder_layers, partition_parameters


def choose_trained(model: nn.Module, workload: TrainingWorkload) -> None:
    """Freeze what the plan does not train; `model` is on the meta device.

    Adapters are injected in place by peft and then stored like any trained parameter: in the
    compute dtype of `mixed` and `bf16`, with a master copy in `mixed`; not in fp32 beside a 16-bit
    base, as peft alone would. The base below them is frozen in the same dtype.
    """
    if workload.base_dtype is BaseDtype.NF4:
        store_in_four_bits(model)
    if workload.lora_rank:
        _inject_adapters(model, workload)
    elif workload.frozen_layers:
        _freeze_first_layers(model, workload.frozen_layers)


def _inject_adapters(model: nn.Module, workload: TrainingWorkload) -> None:
    # Imported here: peft takes as long to import as transformers.
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=workload.lora_rank,
        lora_alpha=2 * workload.lora_rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(target_names(_family(model), workload.lora_targets)),
    )
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _family(model: nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type)


def _freeze_first_layers(model: nn.Module, count: int) -> None:
    if count >= len(decoder_layers(model)):
        raise ValueError(f"{count} frozen layers leave none of the model to train")
    frozen = {"embedding", *(f"layer.{index}" for index in range(count))}
    for members in partition_parameters(model):
        if members.name in frozen:
            for owner, *_ in members.owners:
                owner.module.get_parameter(owner.attribute).requires_grad_(False)
