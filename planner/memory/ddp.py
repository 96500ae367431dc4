"""Bytes that DDP holds at each place of a step, alone or under ZeroRedundancyOptimizer.

Read in torch 2.11: torch/csrc/distributed/c10d/reducer.cpp (buckets) and
torch/distributed/optim/zero_redundancy_optimizer.py (whole parameters dealt out by size).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from planner.memory.adapters import Trained
from planner.memory.groups import GroupTensors, Place, group_numels, group_tensors
from planner.memory.optimizers import (
    Stepped,
    as_stepped,
    optimizer_states,
    temporaries_peak_bytes,
)
from planner.memory.states import HeldGroup, Parts, Precisions, frozen_groups, tied_shares
from planner.model import ModelSpec
from planner.units import MIB_BYTES
from planner.workload import Engine, Optimizer, Precision

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB_BYTES, 25 * MIB_BYTES


def bucket_bytes(sizes_bytes: Sequence[int]) -> list[int]:
    """Return the bytes of DDP's buckets, for gradients of `sizes_bytes` in order of readiness.

    A bucket takes gradients until it holds its limit (1 MiB the first, then 25 MiB) or more.
    """
    buckets: list[int] = []
    filled = 0
    for size_bytes in sizes_bytes:
        filled += size_bytes
        if filled >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


@lru_cache(maxsize=64)
def model_order(
    spec: ModelSpec, itemsize: int, trained: Trained | None = None
) -> tuple[tuple[str, Stepped], ...]:
    """Every trained parameter with its group, in the order of `model.parameters()`."""
    return in_order(trained.trained_shapes if trained else group_tensors(spec), itemsize)


def in_order(shapes: GroupTensors, itemsize: int) -> tuple[tuple[str, Stepped], ...]:
    """Parameters of these shapes with their groups: embedding, layer by layer, head."""
    groups = as_stepped(shapes, itemsize)
    return (
        *(("embedding", tensor) for tensor in groups.embedding),
        *(("layers", t) for layer in range(len(shapes["layers"])) for t in groups.layers[layer]),
        *(("head", tensor) for tensor in groups.head),
    )


@lru_cache(maxsize=512)
def owned(
    spec: ModelSpec,
    itemsize: int,
    world_size: int,
    rank: int = 0,
    trained: Trained | None = None,
) -> tuple[tuple[str, Stepped], ...]:
    """What ZeroRedundancyOptimizer gives `rank` to step, in its order.

    Parameters are dealt out from the largest, each to the first rank with the fewest elements.
    """
    ordered = sorted(model_order(spec, itemsize, trained), key=lambda pair: -pair[1].numel)
    loads = [(0, other) for other in range(min(world_size, len(ordered)))]
    own = []
    for group, tensor in ordered:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + tensor.numel, owner))
        if owner == rank:
            own.append((group, tensor))
    return tuple(own)


class DdpStates:
    """DDP at stage 0, ZeroRedundancyOptimizer over it at stage 1.

    Gradients live in DDP's buckets, which are made once and stay, in the forward too: what
    autograd makes of a parameter is copied into its bucket and freed.
    """

    gradients = "added"

    def __init__(
        self,
        spec: ModelSpec,
        precision: Precision,
        optimizer: Optimizer,
        stage: int,
        world_size: Any,
        accumulates: bool,
        syncs: bool = True,
        trained: Trained | None = None,
    ) -> None:
        """`trained` says what of the model is, where not all is: only that has buckets."""
        self._spec, self._optimizer, self._trained = spec, optimizer, trained
        self._bytes, self._precision = Precisions.of(precision, Engine.DDP), precision
        # Before the last micro-batch nothing is reduced: gradients are tensors beside the buckets.
        self._copies = 2 if accumulates and not syncs else 1
        self._shards, self._world_size = stage == 1, world_size
        self._numels = trained.trained if trained else group_numels(spec)
        self._frozen = trained.frozen if trained else self._numels.map(lambda numel: 0)
        has_tied_gradients = spec.tie_word_embeddings and trained is None
        self._tied_numel = spec.vocab_size * spec.hidden_size if has_tied_gradients else 0

    def persistent(self) -> Parts:
        """Parameters and this rank's optimizer states, in bytes."""
        return {
            "parameters": (self._numels.total() + self._frozen.total()) * self._bytes.parameter
            + (self._trained.four_bit_bytes if self._trained else 0),
            "optimizer": self._of_rank_0(self._state_bytes),
        }

    def _state_bytes(self, tensors: Sequence[tuple[str, Stepped]]) -> int:
        states = optimizer_states(self._optimizer, (tensor for _, tensor in tensors))
        return int(sum(state.size_bytes for state in states))

    def _of_rank_0(self, size: Callable[[Sequence[tuple[str, Stepped]]], int]) -> Any:
        """Evaluate `size` for what rank 0 steps, for every world size where that matters."""
        itemsize = self._bytes.state
        if not self._shards:
            return size(model_order(self._spec, itemsize, self._trained))
        worlds = np.asarray(self._world_size)
        sizes = [size(self._owned(int(n))) for n in worlds.flat]
        return np.array(sizes).reshape(worlds.shape) if worlds.ndim else sizes[0]

    def _owned(self, world_size: int) -> tuple[tuple[str, Stepped], ...]:
        return owned(self._spec, self._bytes.state, world_size, trained=self._trained)

    def held_numels(self) -> list[HeldGroup]:
        """Per kind of group the parameters kept, and what rank 0 steps of them."""
        held = self._stepped_groups()
        if self._trained is None:
            return held
        groups = [*(group for group in held if group.kept), *frozen_groups(self._frozen)]
        layers = self._trained.four_bit_shapes
        if not layers:
            return groups
        # Layers are alike where 4-bit weights are traced.
        size_bytes = self._trained.four_bit_bytes // len(layers)
        name = "frozen layer 4-bit"
        return [*groups, HeldGroup(name, len(layers), size_bytes, 0, (), kept_itemsize=1)]

    def _stepped_groups(self) -> list[HeldGroup]:
        if self._shards:
            return [self._dealt(name) for name in ("embedding", "layers", "head")]
        shapes = self._trained.trained_shapes if self._trained else group_tensors(self._spec)
        tensors = as_stepped(shapes, self._bytes.state)
        states = tensors.map(lambda group: optimizer_states(self._optimizer, group))
        embedding, head = self._numels.embedding, self._numels.head
        layers = [
            HeldGroup(name, count, numel, numel, own)
            for (name, count, numel), own in zip(
                self._numels.layers.by_kind(), states.layers.sizes, strict=True
            )
        ]
        return [
            HeldGroup("embedding", 1, embedding, embedding, states.embedding),
            *layers,
            HeldGroup("head", 1, head, head, states.head),
        ]

    def _dealt(self, name: str) -> HeldGroup:
        kept = self._numels.layers.total() if name == "layers" else getattr(self._numels, name)
        pairs = self._owned(int(self._world_size))
        own = [tensor for group, tensor in pairs if group == name]
        stepped = sum(tensor.numel for tensor in own)
        return HeldGroup(name, 1, kept, stepped, optimizer_states(self._optimizer, own))

    def at(self, place: Place) -> Parts:
        """The buckets, and the shares of a tied weight that autograd holds, in bytes."""
        return {
            "gathered": 0,
            "gradients": self._copies * self._numels.total() * self._bytes.gradient,
            "temporary": tied_shares(place, self._precision)
            * self._tied_numel
            * self._bytes.gradient,
        }

    def flat(self, place: Place) -> tuple[Any, ...]:
        """Nothing: the buckets are there already."""
        return (0, 0, 0)

    def behind_loss(self) -> Parts:
        """Nothing more: what the backward uses is there before."""
        return {}

    def at_section_end(self, place: Place) -> Parts:
        """Nothing: buckets are reduced in place."""
        return {}

    def optimizer_step(self) -> Parts:
        """The buckets, and what the optimizer holds for a moment, in bytes."""
        return {
            "gradients": self._numels.total() * self._bytes.gradient,
            "temporary": self._of_rank_0(self._temporary_bytes),
        }

    def _temporary_bytes(self, tensors: Sequence[tuple[str, Stepped]]) -> int:
        return int(temporaries_peak_bytes(self._optimizer, [tensor for _, tensor in tensors]))
