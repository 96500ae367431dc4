"""What a plan trains: the whole model, adapters on a frozen one, or all but its first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from planner.families import parameter_shapes
from planner.memory.groups import GroupSizes, GroupTensors, PerLayer, Shapes, group_tensors
from planner.memory.nf4 import nf4_bytes
from planner.model import ModelSpec, ParameterShape
from planner.workload import BaseDtype, LoraTargets, TrainingWorkload


class _Targets(NamedTuple):
    """Names of the layers that carry adapters, for each choice of `LoraTargets`."""

    qv: tuple[str, ...]
    all_linear: tuple[str, ...]


_SPLIT_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION_ONLY = _Targets(("q_proj", "v_proj"), _SPLIT_QKVO)
_FUSED_QKV = _Targets(
    ("query_key_value",), ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
)
_LATENT = _Targets(
    ("q_proj", "q_b_proj", "kv_b_proj"),
    ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
)
_DEFAULT_TARGETS = _Targets(("q_proj", "v_proj"), (*_SPLIT_QKVO, *_GATED_MLP))
# Experts are no linear layers in transformers 5 but stacked parameters, and peft 0.21 takes the names
# of their MLPs for these stacks: of a mixture of experts the attention alone carries adapters.
_TARGETS = {
    "phi3": _Targets(("qkv_proj",), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gpt2": _Targets(("c_attn",), ("c_attn", "c_proj", "c_fc")),
    "gpt_neox": _FUSED_QKV,
    "opt": _Targets(("q_proj", "v_proj"), (*_SPLIT_QKVO[:3], "out_proj", "fc1", "fc2")),
    "falcon": _FUSED_QKV,
    "mixtral": _ATTENTION_ONLY,
    "qwen3_moe": _ATTENTION_ONLY,
    "gpt_oss": _ATTENTION_ONLY,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}
# These store the transpose of a linear layer's weight (transformers' Conv1D).
_TRANSPOSED = ("gpt2",)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Elements of each group that are trained and that are frozen in the compute dtype.

    `first_layer` is the lowest layer that a backward reaches. `shapes` are all parameters of each
    group in the order of the module, `trained_shapes` those of them that are trained.
    `four_bit_shapes` are the frozen weights of every layer that are stored in 4 bits.
    """

    trained: GroupSizes
    frozen: GroupSizes
    first_layer: int
    shapes: GroupTensors
    trained_shapes: GroupTensors
    four_bit_shapes: tuple[Shapes, ...] = ()

    def whole_shapes(self) -> GroupTensors:
        """`shapes` without the weights that are stored in 4 bits."""
        if not self.four_bit_shapes:
            return self.shapes
        layers = []
        for shapes, stored in zip(self.shapes["layers"], self.four_bit_shapes, strict=True):
            left = list(shapes)
            for shape in stored:
                left.remove(shape)
            layers.append(tuple(left))
        return _grouped(self.shapes, tuple(layers))

    @property
    def four_bit_bytes(self) -> int:
        """Bytes of the weights that are stored in 4 bits, with their scales."""
        return sum(nf4_bytes(prod(shape)) for layer in self.four_bit_shapes for shape in layer)


def target_names(family: str, targets: LoraTargets) -> tuple[str, ...]:
    """The names of a family's modules that carry adapters, as peft's `target_modules` takes them.

    Where Q, K and V are one layer, `qv` is that layer.
    """
    chosen: tuple[str, ...] = getattr(_TARGETS.get(family, _DEFAULT_TARGETS), str(targets))
    return chosen


def _layer_parameters(spec: ModelSpec) -> list[list[ParameterShape]]:
    layers: list[list[ParameterShape]] = [[] for _ in range(spec.num_layers)]
    for parameter in parameter_shapes(spec):
        if parameter.group == "layer":
            for layer in parameter.layers:
                layers[layer].append(parameter)
    return layers


def _adapter_shapes(spec: ModelSpec, parameter: ParameterShape, rank: int) -> Shapes:
    """A [rank, inputs] and B [outputs, rank], beside a matrix of [outputs, inputs]."""
    outputs, inputs = parameter.shape
    if spec.family in _TRANSPOSED:
        outputs, inputs = inputs, outputs
    return (rank, inputs), (outputs, rank)


def _with_adapters(
    spec: ModelSpec, layer: Sequence[ParameterShape], workload: TrainingWorkload
) -> tuple[Shapes, Shapes]:
    """Every shape of a layer with adapters behind the weight and bias they belong to; theirs alone."""
    names = target_names(spec.family, workload.lora_targets)
    suffixes = tuple(f".{name}.weight" for name in names)
    shapes: list[tuple[int, ...]] = []
    adapters: list[tuple[int, ...]] = []
    waiting: Shapes = ()
    for parameter in layer:
        if not parameter.name.endswith(".bias"):
            shapes += waiting
            waiting = ()
        shapes.append(parameter.shape)
        if parameter.name.endswith(suffixes):
            waiting = _adapter_shapes(spec, parameter, workload.lora_rank)
            adapters += waiting
    return (*shapes, *waiting), tuple(adapters)


def _numels(shapes: GroupTensors) -> GroupSizes:
    def numel(group: Shapes) -> int:
        return sum(prod(shape) for shape in group)

    layers = PerLayer.of(shapes["layers"], numel)
    return GroupSizes(numel(shapes["embedding"]), layers, numel(shapes["head"]))


def _less(sizes: GroupSizes, part: GroupSizes) -> GroupSizes:
    kinds = list(zip(sizes.layers.kinds, part.layers.kinds, strict=True))
    layers = PerLayer.of(kinds, lambda k: sizes.layers.sizes[k[0]] - part.layers.sizes[k[1]])
    return GroupSizes(sizes.embedding - part.embedding, layers, sizes.head - part.head)


@lru_cache(maxsize=64)
def trained_groups(spec: ModelSpec, workload: TrainingWorkload) -> Trained | None:
    """Split a model's groups as the plan trains them; None where it trains all of them."""
    count, whole = workload.frozen_layers, group_tensors(spec)
    if workload.lora_rank:
        layers = [_with_adapters(spec, layer, workload) for layer in _layer_parameters(spec)]
        shapes, adapters = (tuple(part) for part in zip(*layers, strict=True))
        trained = GroupTensors(embedding=(), layers=adapters, head=())
        return _split(_grouped(whole, shapes), trained, four_bit=_four_bit_shapes(spec, workload))
    if not count:
        return None
    above: tuple[Shapes, ...] = (*(() for _ in range(count)), *whole["layers"][count:])
    trained = GroupTensors(embedding=(), layers=above, head=whole["head"])
    return _split(whole, trained, count)


def _grouped(whole: GroupTensors, layers: tuple[Shapes, ...]) -> GroupTensors:
    return GroupTensors(embedding=whole["embedding"], layers=layers, head=whole["head"])


def _four_bit_shapes(spec: ModelSpec, workload: TrainingWorkload) -> tuple[Shapes, ...]:
    """Weights of the linear layers of each decoder layer, where they are stored in 4 bits."""
    if workload.base_dtype is not BaseDtype.NF4:
        return ()
    names = target_names(spec.family, LoraTargets.ALL_LINEAR)
    suffixes = tuple(f".{name}.weight" for name in names)
    return tuple(
        tuple(parameter.shape for parameter in layer if parameter.name.endswith(suffixes))
        for layer in _layer_parameters(spec)
    )


def _split(
    shapes: GroupTensors,
    trained_shapes: GroupTensors,
    first_layer: int = 0,
    four_bit: tuple[Shapes, ...] = (),
) -> Trained:
    trained = _numels(trained_shapes)
    frozen = _less(_numels(shapes), trained)
    if four_bit:
        frozen = _less(frozen, _numels(GroupTensors(embedding=(), layers=four_bit, head=())))
    return Trained(trained, frozen, first_layer, shapes, trained_shapes, four_bit)
