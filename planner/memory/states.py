"""Bytes that the training engines hold at each position of a step, whatever the model computes.

A position is a section of the step (see `templates`); sizes may be NumPy arrays over world sizes.
`peakmark` is our engine (runners/zero): flat groups padded to the world size. `fsdp2` is
torch.distributed.fsdp.fully_shard: parameters padded one by one on their first dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from planner.families import parameter_shapes
from planner.memory.sections import FLAT_GROUPS
from planner.model import ModelSpec
from planner.workload import Engine, Optimizer, Precision

ADAMW_STATES, SGD_STATES = 2, 1
FP32_BYTES = 4
Parts = dict[str, Any]

# The groups whose gradients are finished before a position, as (embedding, layers, head); layers
# are counted from the last one and `inner` is the number of layers between first and last.
BEFORE_BACKWARD = (
    "embed",
    "first_layer",
    "layer:first",
    "layer:last",
    "last_layer",
    "head",
    "loss",
)
BACKWARD_POSITIONS = (
    "loss_backward",
    "last_layer_backward",
    "layer_backward:first",
    "layer_backward:last",
    "first_layer_backward",
    "embed_backward",
)
POSITIONS = (*BEFORE_BACKWARD, *BACKWARD_POSITIONS)
_IN_A_LAYER = tuple(p for p in POSITIONS if "layer" in p)
_HEAD_IS_GATHERED = ("head", "loss", "loss_backward")


@dataclass(frozen=True, slots=True)
class Precisions:
    """Bytes per element of what a precision keeps."""

    parameter: int
    gradient: int
    state: int
    master: int

    @classmethod
    def of(cls, precision: Precision, engine: Engine) -> Precisions:
        """Element sizes: `mixed` in our engine is bf16 with fp32 master, in FSDP2 fp32 shards."""
        if precision is Precision.BF16:
            return cls(2, 2, 2, 0)
        if precision is Precision.MIXED and engine is Engine.PEAKMARK:
            return cls(2, 2, 4, 4)
        return cls(4, 4, 4, 0)


@lru_cache(maxsize=64)
def group_shapes(spec: ModelSpec) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Per group, (rows, elements per row) of each parameter; a layer's are listed once."""
    groups: dict[str, list[tuple[int, int]]] = {"embedding": [], "layer": [], "head": []}
    for shape in parameter_shapes(spec):
        groups[shape.group].append((shape.shape[0], shape.numel // shape.shape[0]))
    return {name: tuple(rows) for name, rows in groups.items()}


def group_numels(spec: ModelSpec) -> dict[str, int]:
    """Elements of each group (one layer for "layer")."""
    return {n: sum(r * c for r, c in rows) for n, rows in group_shapes(spec).items()}


def _ceil_div(numerator: Any, denominator: Any) -> Any:
    return -(-numerator // denominator)


def state_count(optimizer: Optimizer) -> int:
    """State tensors per parameter: two moments for AdamW, one momentum for SGD."""
    return SGD_STATES if optimizer is Optimizer.SGD else ADAMW_STATES


def optimizer_temporaries(optimizer: Optimizer) -> int:
    """Parameter-sized tensors alive at once inside one optimizer call, beyond its states.

    torch/optim/adamw.py, 2.11: foreach keeps the square roots of all second moments; the loop also
    the quotient it divides them into; fused none. SGD with momentum works in place.
    """
    return {Optimizer.ADAMW_FOREACH: 1, Optimizer.ADAMW_LOOP: 2}.get(optimizer, 0)


def finished_layers(position: str, inner: int) -> int:
    """Layers whose backward is over before `position` begins."""
    return {
        "layer_backward:first": 1,
        "layer_backward:last": inner,
        "first_layer_backward": 1 + inner,
        "embed_backward": 2 + inner,
    }.get(position, 0)


def tied_shares(position: str) -> int:
    """Gradients of a tied weight that autograd holds beside the one of the running section."""
    return (position in BACKWARD_POSITIONS[1:]) + (position == "embed_backward")


class PeakmarkStates:
    """Our engine at one stage: what each position of a step holds beside the model's tensors."""

    gradients = "added"

    def __init__(
        self,
        spec: ModelSpec,
        precision: Precision,
        optimizer: Optimizer,
        stage: int,
        world_size: Any,
        accumulates: bool,
    ) -> None:
        self._bytes = Precisions.of(precision, Engine.PEAKMARK)
        self._stage, self._accumulates = stage, accumulates
        self._layers = spec.num_layers
        numels = group_numels(spec)
        self._embeds_once = len(group_shapes(spec)["embedding"]) == 1
        self._tied_numel = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
        self.shard = {n: _ceil_div(numel, world_size) for n, numel in numels.items()}
        self.padded = {n: shard * world_size for n, shard in self.shard.items()}
        self._states, self._temporaries = state_count(optimizer), optimizer_temporaries(optimizer)

    def _all(self, sizes: Mapping[str, Any]) -> Any:
        return sizes["embedding"] + self._layers * sizes["layer"] + sizes["head"]

    def persistent(self) -> Parts:
        """Parameters and optimizer states, in bytes."""
        parameters = self._all(self.shard if self._stage == 3 else self.padded)
        stepped = self._all(self.padded if self._stage == 0 else self.shard)
        per_element = self._bytes.master + self._bytes.state * self._states
        return {
            "parameters": parameters * self._bytes.parameter,
            "optimizer": stepped * per_element,
        }

    def held_numels(self) -> dict[str, tuple[Any, Any]]:
        """Per group, elements of the parameters kept and of what the optimizer steps."""
        return {
            name: (
                self.shard[name] if self._stage == 3 else self.padded[name],
                self.padded[name] if self._stage == 0 else self.shard[name],
            )
            for name in self.shard
        }

    def at(self, position: str) -> Parts:
        """Gathered parameters and gradients of groups begun before `position`, in bytes."""
        return {
            "gathered": self._gathered(position) * self._bytes.parameter,
            "gradients": self._gradients(position) * self._bytes.gradient,
            # Autograd holds the head's share of a tied weight until the embedding's is there, and
            # then sums both into a third tensor.
            "temporary": tied_shares(position) * self._tied_numel * self._bytes.gradient,
        }

    def _gathered(self, position: str) -> Any:
        if self._stage < 3:
            return 0
        whole = self.padded["embedding"]
        if position in _IN_A_LAYER:
            whole = whole + self.padded["layer"]
        if position in _HEAD_IS_GATHERED:
            whole = whole + self.padded["head"]
        return whole

    def _gradients(self, position: str) -> Any:
        inner = self._layers - 2
        done = finished_layers(position, inner)
        if self._accumulates:
            return self._all(self.shard if self._stage >= 2 else self.padded)
        if position in BEFORE_BACKWARD:
            return 0
        after_loss = position != "loss_backward"
        sizes = self.shard if self._stage >= 2 else self.padded
        return done * sizes["layer"] + after_loss * sizes["head"]

    def flat(self, position: str) -> tuple[Any, ...]:
        """Bytes of the flat gradient that begins in `position`, per entry of FLAT_GROUPS.

        Stages 0 and 1 keep it over micro-batches; 2 and 3 make it anew for each.
        """
        if self._accumulates and self._stage < 2:
            return (0, 0, 0)
        sizes = [self.padded[name.removeprefix("flat_")] for name in FLAT_GROUPS]
        if position == "embed_backward" and self._embeds_once:
            # The buffer begins when only the sum of a tied weight's shares is left. With learned
            # positions it begins before, at their gradient.
            sizes[0] = sizes[0] - tied_shares(position) * self._tied_numel
        return tuple(size * self._bytes.gradient for size in sizes)

    def at_section_end(self, position: str) -> Parts:
        """What reducing the finished group adds at the end of a backward section, in bytes."""
        if self._stage < 2 or position not in BACKWARD_POSITIONS:
            return {}
        group = {"loss_backward": "head", "embed_backward": "embedding"}.get(position, "layer")
        return {"gradients": self.shard[group] * self._bytes.gradient}

    def optimizer_step(self) -> Parts:
        """Gradients and temporaries while the largest group's optimizer steps, in bytes."""
        held = self._all(self.shard if self._stage >= 2 else self.padded)
        stepped = self.padded if self._stage == 0 else self.shard
        largest = np.maximum(np.maximum(stepped["embedding"], stepped["layer"]), stepped["head"])
        cast_bytes = FP32_BYTES if self._bytes.master else 0
        temporary = largest * (cast_bytes + self._temporaries * self._bytes.state)
        return {"gradients": held * self._bytes.gradient, "temporary": temporary}
