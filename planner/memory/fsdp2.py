"""Bytes that FSDP2 holds at each position of a step (torch.distributed.fsdp.fully_shard)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from planner.memory.states import (
    BACKWARD_POSITIONS,
    BEFORE_BACKWARD,
    Parts,
    Precisions,
    finished_layers,
    group_shapes,
    optimizer_temporaries,
    state_count,
    tied_shares,
)
from planner.model import ModelSpec
from planner.workload import Engine, Optimizer, Precision

_BF16_BYTES, _FP32_BYTES = 2, 4
_FORWARD_LAYERS = {"first_layer": 1, "layer:first": 2}


def row_shards(shapes: Sequence[tuple[int, int]], world_size: Any) -> Any:
    """Elements one rank stores: each parameter gives ceil(rows / N) rows, so at least one."""
    return sum(-(-rows // world_size) * columns for rows, columns in shapes)


class Fsdp2States:
    """FSDP2: every decoder layer is one unit; the rest is the root unit, never freed in a step.

    Lifetimes as in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (2.11 to 2.13): the
    all-gather output of a unit outlives its copy-out until the next unit is gathered; in the
    backward the next unit is gathered ahead, and a reduce-scatter's input lives until the next one.
    With one rank there is no all-gather buffer, but the copy and the reduction remain.
    """

    gradients = "kept"

    def __init__(
        self,
        spec: ModelSpec,
        precision: Precision,
        optimizer: Optimizer,
        stage: int,
        world_size: Any,
        accumulates: bool,
    ) -> None:
        sizes = Precisions.of(precision, Engine.FSDP2)
        low = precision in (Precision.MIXED, Precision.BF16)
        self._compute = _BF16_BYTES if low else _FP32_BYTES
        self._stored, self._state = sizes.parameter, sizes.state * state_count(optimizer)
        self._layers = spec.num_layers
        self._reshards, self._accumulates = stage == 3, accumulates
        shapes = group_shapes(spec)
        units = {"layer": shapes["layer"], "root": shapes["embedding"] + shapes["head"]}
        self._numel = {name: row_shards(rows, 1) for name, rows in units.items()}
        self._tied_numel = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
        self._embedding_numel = row_shards(shapes["embedding"], 1)
        self.shard = {name: row_shards(rows, world_size) for name, rows in units.items()}
        self._padded = {name: shard * world_size for name, shard in self.shard.items()}
        # A gather buffer holds every rank's rows; with one rank it is skipped.
        self._gather = {n: np.where(np.equal(world_size, 1), 0, p) for n, p in self._padded.items()}
        self._temporaries = optimizer_temporaries(optimizer)
        self._largest = reduce(
            np.maximum, [row_shards([row], world_size) for rows in units.values() for row in rows]
        )
        self._state_bytes = sizes.state

    def _all_shards(self) -> Any:
        return self._layers * self.shard["layer"] + self.shard["root"]

    def persistent(self) -> Parts:
        """Sharded parameters and optimizer states, in bytes."""
        shards = self._all_shards()
        return {"parameters": shards * self._stored, "optimizer": shards * self._state}

    def held_numels(self) -> dict[str, tuple[Any, Any]]:
        """Per unit, elements of the sharded parameters and of what the optimizer steps."""
        return {name: (shard, shard) for name, shard in self.shard.items()}

    def at(self, position: str) -> Parts:
        """Gathered units, gradients and the last reduce-scatter's input, in bytes."""
        return {
            "gathered": self._gathered(position) * self._compute,
            "gradients": self._gradients(position),
            "temporary": self._last_reduction(position),
        }

    def _gathered(self, position: str) -> Any:
        copy, buffer = self._numel["layer"], self._gather["layer"]
        root = self._numel["root"] + (self._gather["root"] if position == "embed" else 0)
        if position in BEFORE_BACKWARD:
            return root + self._forward_copies(position) * copy + (position != "embed") * buffer
        if not self._reshards:
            alive = self._layers - finished_layers(position, self._layers - 2)
            return root + alive * copy
        ahead = position not in ("first_layer_backward", "embed_backward")
        own = position not in ("loss_backward", "embed_backward")
        return root + own * copy + ahead * buffer

    def _forward_copies(self, position: str) -> int:
        in_layer = "layer" in position
        if self._reshards:
            return int(in_layer)
        seen = {"embed": 0, **_FORWARD_LAYERS, "layer:last": self._layers - 1}
        return seen.get(position, self._layers)

    def _gradients(self, position: str) -> Any:
        shards: Any = 0
        if self._accumulates:
            shards = self._all_shards()
        elif position in BACKWARD_POSITIONS:
            shards = finished_layers(position, self._layers - 2) * self.shard["layer"]
        after_loss = position in BACKWARD_POSITIONS[1:]
        root = after_loss * (self._numel["root"] - self._embedding_numel)
        tied = tied_shares(position) * self._tied_numel
        return shards * self._stored + (root + tied) * self._compute

    def _reduced(self, unit: str) -> Any:
        return self._padded[unit] * self._stored

    def _last_reduction(self, position: str) -> Any:
        return (position in BACKWARD_POSITIONS[2:]) * self._reduced("layer")

    def flat(self, position: str) -> tuple[Any, ...]:
        """FSDP2 keeps the gradients autograd made: there are no flat buffers before reduction."""
        return (0, 0, 0)

    def at_section_end(self, position: str) -> Parts:
        """A unit's reduction: input and output appear, its copy and the last input are gone."""
        if position not in BACKWARD_POSITIONS[1:]:
            return {}
        unit = "root" if position == "embed_backward" else "layer"
        # The gradients are freed once copied into the input; only then the output appears.
        freed = self._numel[unit] * self._compute
        output = np.maximum(self.shard[unit] * self._stored - freed, 0)
        reduction = self._reduced(unit) + output
        parts: Parts = {
            "temporary": reduction - self._last_reduction(position),
            "gathered": -self._numel[unit] * self._compute,
        }
        if unit == "root":
            # The two shares of a tied weight are gone: only their sum is reduced.
            parts["gradients"] = -2 * self._tied_numel * self._compute
        return parts

    def optimizer_step(self) -> Parts:
        """Sharded gradients and the optimizer's temporaries over all parameters, in bytes."""
        shards = self._all_shards()
        foreach = self._temporaries == 1
        stepped = shards if foreach else self._largest
        return {
            "gradients": shards * self._stored,
            "temporary": self._temporaries * stepped * self._state_bytes,
        }
