"""Low-rank adapters: two matrices beside each linear layer that carries them."""

from __future__ import annotations

from planner.families import parameter_shapes
from planner.memory.groups import GroupSizes, PerLayer
from planner.model import ModelSpec
from planner.workload import LoraTargets, TrainingWorkload

ADAPTED_FAMILIES = ("llama", "qwen2", "qwen3")
_TARGETS = {
    LoraTargets.QV: ("q_proj", "v_proj"),
    LoraTargets.ALL_LINEAR: (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}


def adapter_numels(spec: ModelSpec, rank: int, targets: LoraTargets) -> GroupSizes:
    """Elements of each group's adapters: rank x (inputs + outputs) per linear layer (peft)."""
    in_layer = sum(
        rank * sum(parameter.shape)
        for parameter in parameter_shapes(spec)
        if parameter.name.endswith(tuple(f"{name}.weight" for name in _TARGETS[targets]))
    )
    return GroupSizes(0, PerLayer((0,) * spec.num_layers, (in_layer,)), 0)


def adapters_of(spec: ModelSpec, workload: TrainingWorkload) -> GroupSizes | None:
    """The adapters that a plan trains, or None where it trains the model itself."""
    if not workload.lora_rank:
        return None
    return adapter_numels(spec, workload.lora_rank, workload.lora_targets)
