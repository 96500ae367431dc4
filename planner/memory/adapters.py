"""What a plan trains: the whole model, adapters on a frozen one, or all but its first layers."""

from __future__ import annotations

from dataclasses import dataclass

from planner.families import parameter_shapes
from planner.memory.groups import GroupSizes, PerLayer, group_numels
from planner.model import ModelSpec
from planner.workload import LoraTargets, TrainingWorkload

_TARGETS = {
    LoraTargets.QV: ("q_proj", "v_proj"),
    LoraTargets.ALL_LINEAR: (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """Elements of each group that are trained and that are frozen.

    `first_layer` is the lowest layer that a backward reaches.
    """

    trained: GroupSizes
    frozen: GroupSizes
    first_layer: int


def adapter_numels(spec: ModelSpec, rank: int, targets: LoraTargets) -> GroupSizes:
    """Elements of each group's adapters: rank x (inputs + outputs) per linear layer (peft)."""
    in_layer = sum(
        rank * sum(parameter.shape)
        for parameter in parameter_shapes(spec)
        if parameter.name.endswith(tuple(f"{name}.weight" for name in _TARGETS[targets]))
    )
    return GroupSizes(0, PerLayer((0,) * spec.num_layers, (in_layer,)), 0)


def trained_groups(spec: ModelSpec, workload: TrainingWorkload) -> Trained | None:
    """Split a model's groups as the plan trains them; None where it trains all of them."""
    numels, count = group_numels(spec), workload.frozen_layers
    if workload.lora_rank:
        adapters = adapter_numels(spec, workload.lora_rank, workload.lora_targets)
        return Trained(adapters, numels, 0)
    if not count:
        return None
    layers = [numels.layers[layer] for layer in range(spec.num_layers)]
    below = PerLayer.of([(n, i < count) for i, n in enumerate(layers)], lambda pair: pair)
    trained = GroupSizes(0, below.map(lambda pair: 0 if pair[1] else pair[0]), numels.head)
    frozen = GroupSizes(numels.embedding, below.map(lambda pair: pair[0] if pair[1] else 0), 0)
    return Trained(trained, frozen, count)
