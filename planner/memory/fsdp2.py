"""Bytes that FSDP2 holds at each place of a step (torch.distributed.fsdp.fully_shard)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.memory.adapters import Trained
from planner.memory.groups import GroupShapes, PerLayer, Place, Rows, group_shapes, rows_of
from planner.memory.optimizers import State, Stepped, optimizer_states, temporaries_peak_bytes
from planner.memory.states import (
    HeldGroup,
    Parts,
    Precisions,
    first_finished,
    tied_shares,
)
from planner.model import ModelSpec
from planner.workload import Engine, Optimizer, Precision, ReduceDtype

_BF16_BYTES, _FP32_BYTES = 2, 4


def row_shards(shapes: Sequence[tuple[int, int]], world_size: Any) -> Any:
    """Elements one rank stores: each parameter gives ceil(rows / N) rows, so at least one."""
    return sum(-(-rows // world_size) * columns for rows, columns in shapes)


def reduced_bytes(precision: Precision, reduce_dtype: ReduceDtype) -> int:
    """Bytes of an element in FSDP2's reductions: left to itself those of the stored parameters."""
    stored = Precisions.of(precision, Engine.FSDP2).parameter
    return {ReduceDtype.BF16: _BF16_BYTES, ReduceDtype.FP32: _FP32_BYTES}.get(reduce_dtype, stored)


def casts_to_reduce(precision: Precision, reduce_dtype: ReduceDtype) -> bool:
    """Whether gradients are made in another dtype than they are reduced in."""
    low = precision in (Precision.MIXED, Precision.BF16)
    made = _BF16_BYTES if low else _FP32_BYTES
    return made != reduced_bytes(precision, reduce_dtype)


@dataclass(frozen=True, slots=True)
class _Units:
    """One size per unit: the root's and every layer's; sizes may be arrays."""

    root: Any
    layers: PerLayer

    @classmethod
    def of(cls, root: Rows, layers: Sequence[Rows], world_size: Any) -> _Units:
        """Elements that one of `world_size` ranks stores."""
        per_layer = PerLayer.of(layers, lambda rows: row_shards(rows, world_size))
        return cls(row_shards(root, world_size), per_layer)

    def map(self, function: Callable[[Any], Any]) -> _Units:
        """Return `function` of every size."""
        return _Units(function(self.root), self.layers.map(function))

    def total(self) -> Any:
        """Return the sum over all units."""
        return self.layers.total() + self.root


class Fsdp2States:
    """FSDP2: every decoder layer is one unit; the rest is the root unit, never freed in a step.

    Lifetimes as in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (2.11 to 2.13): the
    all-gather output of a unit outlives its copy-out until the next unit is copied out; in the
    backward the next unit is gathered ahead, and a reduce-scatter's input lives until the next one.
    With one rank there is no all-gather buffer, but the copy and the reduction remain.
    """

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
        reduce_dtype: ReduceDtype = ReduceDtype.AUTO,
    ) -> None:
        """`syncs`: gradients are reduced after every micro-batch, not only after the last.

        `trained` says what of the model is, where not all is: a unit is gathered whole, of its
        gradients only those of what is trained are reduced.
        """
        sizes = Precisions.of(precision, Engine.FSDP2)
        self._precision = precision
        low = precision in (Precision.MIXED, Precision.BF16)
        self._compute = _BF16_BYTES if low else _FP32_BYTES
        self._stored, self._state_bytes = sizes.parameter, sizes.state
        self._layers = spec.num_layers
        self._reshards, self._accumulates = stage == 3, accumulates
        self._keeps_whole = accumulates and not syncs
        # Whole gradients wait in the dtype of the reduction, where that is another one in a tensor
        # of their own; otherwise autograd adds to the parameter's.
        self._reduced = reduced_bytes(precision, reduce_dtype)
        self._casts = casts_to_reduce(precision, reduce_dtype)
        self.gradients = "added" if self._keeps_whole and not self._casts else "kept"
        self._first_trained = trained.first_layer if trained else 0
        # Nothing needs a gradient before the first trained layer: its unit is reduced at the end.
        self._is_late = trained is not None
        has_tied_gradients = spec.tie_word_embeddings and trained is None
        self._tied_numel = spec.vocab_size * spec.hidden_size if has_tied_gradients else 0
        self._optimizer = optimizer
        shapes = rows_of(trained.shapes) if trained else group_shapes(spec)
        self._set_units(shapes, world_size)
        self._set_trained(rows_of(trained.trained_shapes) if trained else shapes, world_size)

    def _set_units(self, shapes: GroupShapes, world_size: Any) -> None:
        """Sizes of every unit with all its parameters, which are stored and gathered together."""
        root = shapes["embedding"] + shapes["head"]
        self._numel = _Units.of(root, shapes["layers"], 1)
        self.shard = _Units.of(root, shapes["layers"], world_size)
        # A gather buffer holds every rank's rows; with one rank it is skipped.
        is_alone = np.equal(world_size, 1)
        self._gather = self.shard.map(lambda shard: np.where(is_alone, 0, shard * world_size))

    def _set_trained(self, shapes: GroupShapes, world_size: Any) -> None:
        """Sizes of what is reduced and stepped of every unit."""
        root = shapes["embedding"] + shapes["head"]
        self._grad_numel = _Units.of(root, shapes["layers"], 1)
        self._embedding_numel = row_shards(shapes["embedding"], 1)
        self._grad_shard = _Units.of(root, shapes["layers"], world_size)
        self._padded = self._grad_shard.map(lambda shard: shard * world_size)
        is_alone = np.equal(world_size, 1)
        # One rank has no loop over the gradients of a unit, whose variable holds the last.
        self._last = _Units.of(root[-1:], [rows[-1:] for rows in shapes["layers"]], 1).map(
            lambda size: np.where(is_alone, 0, size)
        )
        # Every kind of layer twice: what one parameter's step leaves meets the next one's.
        kinds = [rows for rows in dict.fromkeys(shapes["layers"]) for _ in range(2)]
        ordered = [*shapes["embedding"], *(row for rows in kinds for row in rows), *shapes["head"]]
        self._tensors = [self._stepped(row_shards([row], world_size)) for row in ordered]

    def persistent(self) -> Parts:
        """Sharded parameters and optimizer states, in bytes."""
        states = optimizer_states(self._optimizer, [self._stepped(self._grad_shard.total())])
        state_bytes = sum(state.size_bytes for state in states)
        return {"parameters": self.shard.total() * self._stored, "optimizer": state_bytes}

    def _stepped(self, numel: Any) -> Stepped:
        return Stepped((numel,), self._state_bytes)

    def held_numels(self) -> list[HeldGroup]:
        """Per kind of unit, elements of the sharded parameters and of what the optimizer steps."""
        every, trained = self.shard, self._grad_shard
        kinds = PerLayer.of(
            list(zip(every.layers.kinds, trained.layers.kinds, strict=True)),
            lambda pair: (every.layers.sizes[pair[0]], trained.layers.sizes[pair[1]]),
        )
        units = [*kinds.by_kind(), ("root", 1, (every.root, trained.root))]
        return [
            HeldGroup(name, count, kept, stepped, self._states_of(stepped))
            for name, count, (kept, stepped) in units
        ]

    def _states_of(self, numel: Any) -> tuple[State, ...]:
        return optimizer_states(self._optimizer, [self._stepped(numel)]) if numel else ()

    def at(self, place: Place) -> Parts:
        """Gathered units, gradients and the last reduce-scatter's input, in bytes."""
        return {
            "gathered": self._gathered(place) * self._compute,
            "gradients": self._gradients(place),
            "temporary": self._last_reduction(place),
        }

    def _gathered(self, place: Place) -> Any:
        root, buffers = self._numel.root, self._gather.layers
        if place.section == "embed":
            return root + self._gather.root
        if not place.in_backward:
            layer = place.layer if place.in_layer else self._layers - 1
            return root + self._forward_copies(place) + buffers[layer]
        if not self._reshards:
            return root + self._numel.layers.total(0, self._first_reduced(place))
        if place.section == "loss_backward":
            return root + buffers[self._layers - 1]
        if place.section == "embed_backward" and not self._is_late:
            return root
        # The first trained unit stays to the end, and so does what was gathered ahead of it.
        layer = max(place.layer, self._first_trained)
        ahead = buffers[layer - 1] if layer else 0
        return root + self._numel.layers[layer] + ahead

    def _forward_copies(self, place: Place) -> Any:
        if self._reshards:
            return self._numel.layers[place.layer] if place.in_layer else 0
        return self._numel.layers.total(0, place.layer + 1 if place.in_layer else None)

    def _gradients(self, place: Place) -> Any:
        shards: Any = 0
        if self._keeps_whole:
            shards = self._grad_numel.total()
        elif self._accumulates:
            shards = self._grad_shard.total()
        elif place.in_backward:
            shards = self._grad_shard.layers.total(self._first_reduced(place))
        after_loss = place.in_backward and place.section != "loss_backward"
        after_loss = after_loss and self.gradients == "kept"
        root = after_loss * (self._grad_numel.root - self._embedding_numel)
        if after_loss and first_finished(place, self._layers) < self._first_reduced(place):
            root = root + self._grad_numel.layers[self._first_trained]
        tied = tied_shares(place, self._precision) * self._tied_numel
        # Whole ones wait in the reduction's dtype, shards are in that of the parameters.
        itemsize = self._reduced if self._keeps_whole else self._stored
        return shards * itemsize + (root + tied) * self._compute

    def _first_reduced(self, place: Place) -> int:
        """The lowest layer whose unit is reduced before `place` begins."""
        finished = first_finished(place, self._layers)
        return max(finished, self._first_trained + 1) if self._is_late else finished

    def _last_reduction(self, place: Place) -> Any:
        before = self._first_reduced(place)
        if self._keeps_whole or not place.in_backward or before >= self._layers:
            return 0  # without a reduction each time, the last one frees more than its input takes
        return self._padded.layers[before] * self._reduced

    def flat(self, place: Place) -> tuple[Any, ...]:
        """FSDP2 keeps the gradients autograd made: there are no flat buffers before reduction."""
        return (0, 0, 0)

    def behind_loss(self) -> Parts:
        """Nothing more: what the backward uses is there before."""
        return {}

    def at_section_end(self, place: Place) -> Parts:
        """The next unit's gathering in the forward, the unit's reduction in the backward.

        Input and output of a reduction appear, the unit's copy and the last input are gone.
        """
        if not place.in_backward:
            return {"gathered": self._next_unit(place) * self._compute}
        if place.section == "loss_backward":
            return {}
        is_root = place.section == "embed_backward"
        if is_root and self._keeps_whole:
            return {}
        if self._is_late and not is_root and place.layer <= self._first_trained:
            return {}
        numel, shard, padded, gradients = (
            units.root if is_root else units.layers[place.layer]
            for units in (self._numel, self._grad_shard, self._padded, self._grad_numel)
        )
        # The gradients are freed once copied into the input, but for the last parameter's (see
        # `replay_fsdp2`); only then the output appears.
        last = self._last.root if is_root else self._last.layers[place.layer]
        freed = (gradients - last) * self._compute
        cast = shard * self._stored if self._reduced != self._stored else 0
        output = np.maximum(shard * self._reduced + cast - freed, 0)
        parts: Parts = {
            "temporary": padded * self._reduced + output - self._last_reduction(place),
            "gathered": -numel * self._compute,
        }
        if is_root:
            # The two shares of a tied weight are gone: only their sum is reduced.
            parts["gradients"] = -2 * self._tied_numel * self._compute
        return parts

    def _next_unit(self, place: Place) -> Any:
        """Elements added while the next layer is copied out of its buffer, beside the last one."""
        following = place.layer + 1 if place.in_layer else 0
        if place.section in ("head", "loss") or following == self._layers:
            return 0
        freed = self._numel.layers[place.layer] if place.in_layer and self._reshards else 0
        return self._gather.layers[following] + self._numel.layers[following] - freed

    def optimizer_step(self) -> Parts:
        """Sharded gradients and the optimizer's temporaries over all parameters, in bytes."""
        shards = self._grad_shard.total()
        foreach = self._optimizer is Optimizer.ADAMW_FOREACH
        tensors = [self._stepped(shards)] if foreach else self._tensors
        return {
            "gradients": shards * self._stored,
            "temporary": temporaries_peak_bytes(self._optimizer, tensors),
        }
