"""The parameter groups that engines shard, layer by layer, and the places of a training step.

Layers may differ: a model can begin with dense layers and go on with mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from typing import Any, NamedTuple, TypedDict

import numpy as np

from planner.families import parameter_shapes
from planner.model import ModelSpec

Shapes = tuple[tuple[int, ...], ...]
Rows = tuple[tuple[int, int], ...]

BACKWARD_SECTIONS = ("loss_backward", "layer_backward", "embed_backward")
FORWARD_SECTIONS = ("embed", "layer", "head", "loss")


class Place(NamedTuple):
    """A section of a step and, in a layer's section, which layer runs it."""

    section: str
    layer: int = 0

    @property
    def in_layer(self) -> bool:
        """Whether a decoder layer runs here."""
        return self.section.startswith("layer")

    @property
    def in_backward(self) -> bool:
        """Whether the loss is behind."""
        return self.section in BACKWARD_SECTIONS


class GroupTensors(TypedDict):
    """Shapes of every parameter, in the model's order: embedding, each layer, head."""

    embedding: Shapes
    layers: tuple[Shapes, ...]
    head: Shapes


class GroupShapes(TypedDict):
    """(rows, elements per row) of every parameter: embedding, each layer, head."""

    embedding: Rows
    layers: tuple[Rows, ...]
    head: Rows


@lru_cache(maxsize=64)
def group_tensors(spec: ModelSpec) -> GroupTensors:
    """Return the shapes of each group's parameters; "layers" has one entry per layer."""
    ends: dict[str, list[tuple[int, ...]]] = {"embedding": [], "head": []}
    layers: list[list[tuple[int, ...]]] = [[] for _ in range(spec.num_layers)]
    for parameter in parameter_shapes(spec):
        if parameter.group in ends:
            ends[parameter.group].append(parameter.shape)
            continue
        for name in parameter.names():
            layers[_layer_of(name)].append(parameter.shape)
    return {
        "embedding": tuple(ends["embedding"]),
        "layers": tuple(tuple(shapes) for shapes in layers),
        "head": tuple(ends["head"]),
    }


@lru_cache(maxsize=64)
def group_shapes(spec: ModelSpec) -> GroupShapes:
    """Return `group_tensors` as rows."""
    return rows_of(group_tensors(spec))


def rows_of(tensors: GroupTensors) -> GroupShapes:
    """Return shapes as rows: what a shard along the first dimension is cut from."""
    return {
        "embedding": _rows(tensors["embedding"]),
        "layers": tuple(_rows(shapes) for shapes in tensors["layers"]),
        "head": _rows(tensors["head"]),
    }


def _rows(shapes: Shapes) -> Rows:
    return tuple((shape[0], prod(shape[1:])) for shape in shapes)


def _layer_of(name: str) -> int:
    return int(next(part for part in name.split(".") if part.isdigit()))


@dataclass(frozen=True, slots=True)
class PerLayer:
    """A size of every decoder layer, kept once per kind of layer; sizes may be arrays."""

    kinds: tuple[int, ...]
    sizes: tuple[Any, ...]

    @classmethod
    def of(cls, layers: Sequence[Any], size: Callable[[Any], Any]) -> PerLayer:
        """Evaluate `size` for each distinct layer of `layers`."""
        distinct = list(dict.fromkeys(layers))
        number = {rows: index for index, rows in enumerate(distinct)}
        return cls(tuple(number[rows] for rows in layers), tuple(size(rows) for rows in distinct))

    def __getitem__(self, layer: int) -> Any:
        return self.sizes[self.kinds[layer]]

    def map(self, function: Callable[[Any], Any]) -> PerLayer:
        """Return `function` of every size."""
        return PerLayer(self.kinds, tuple(function(size) for size in self.sizes))

    def total(self, first: int = 0, end: int | None = None) -> Any:
        """Return the sum over the layers from `first` up to, not including, `end`."""
        part = self.kinds[first:end]
        return sum(part.count(kind) * size for kind, size in enumerate(self.sizes))

    def largest(self) -> Any:
        """Return the largest layer's size, elementwise over arrays."""
        return reduce(np.maximum, self.sizes)

    def by_kind(self) -> list[tuple[str, int, Any]]:
        """Return (name, number of layers, size) of each kind: "layer", or "layers 0-2", ..."""
        if len(self.sizes) == 1:
            return [("layer", len(self.kinds), self.sizes[0])]
        members = [[i for i, k in enumerate(self.kinds) if k == n] for n in range(len(self.sizes))]
        return [
            (f"layers {layer_ranges(numbers)}", len(numbers), size)
            for numbers, size in zip(members, self.sizes, strict=True)
        ]


def layer_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as "0-2, 5"; long lists end in an ellipsis."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(words if len(words) <= _MOST_RANGES else [*words[:_MOST_RANGES], "..."])


_MOST_RANGES = 4


def rows_numel(rows: Rows) -> int:
    """Elements of a group's parameters."""
    return sum(count * columns for count, columns in rows)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """One size per group: the embedding's, every layer's, the head's; sizes may be arrays."""

    embedding: Any
    layers: PerLayer
    head: Any

    def map(self, function: Callable[[Any], Any]) -> GroupSizes:
        """Return `function` of every size."""
        return GroupSizes(function(self.embedding), self.layers.map(function), function(self.head))

    def total(self) -> Any:
        """Return the sum over all groups."""
        return self.embedding + self.layers.total() + self.head

    def largest(self) -> Any:
        """Return the largest group's size, elementwise over arrays."""
        return np.maximum(np.maximum(self.embedding, self.layers.largest()), self.head)

    def of(self, group: str, layer: int = 0) -> Any:
        """Return the size of "embedding", "head" or, for "layer", of that layer."""
        return self.layers[layer] if group == "layer" else getattr(self, group)


@lru_cache(maxsize=64)
def group_numels(spec: ModelSpec) -> GroupSizes:
    """Return the elements of each group."""
    shapes = group_shapes(spec)
    return GroupSizes(
        embedding=rows_numel(shapes["embedding"]),
        layers=PerLayer.of(shapes["layers"], rows_numel),
        head=rows_numel(shapes["head"]),
    )
