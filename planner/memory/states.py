"""Bytes that the training engines hold at each place of a step, whatever the model computes.

A place is a section of the step and a layer (see `groups`); sizes may be NumPy arrays over world
sizes.
`peakmark` is our engine (runners/zero): flat groups padded to the world size. `fsdp2` is
torch.distributed.fsdp.fully_shard: parameters padded one by one on their first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from planner.memory.adapters import Trained
from planner.memory.groups import GroupSizes, PerLayer, Place, group_numels, group_shapes
from planner.memory.optimizers import (
    State,
    casts_gradients,
    optimizer_states,
    stepped_groups,
    temporaries_peak_bytes,
)
from planner.model import ModelSpec
from planner.rank import RankSpec, with_all_experts
from planner.workload import Engine, Optimizer, Precision, ReduceDtype

Parts = dict[str, Any]
_CHOSEN_BYTES = {ReduceDtype.BF16: 2, ReduceDtype.FP32: 4}


class HeldGroup(NamedTuple):
    """Groups of one size: elements of the parameters kept and of what is stepped.

    `kept_itemsize` are the bytes of a kept element where they are not the precision's.
    """

    name: str
    number: int
    kept: Any
    stepped: Any
    states: tuple[State, ...]
    kept_itemsize: int | None = None


@dataclass(frozen=True, slots=True)
class Precisions:
    """Bytes per element of what a precision keeps."""

    parameter: int
    gradient: int
    state: int
    master: int

    @classmethod
    def of(
        cls, precision: Precision, engine: Engine, stage: int = 0, offloads: bool = False
    ) -> Precisions:
        """Element sizes: `mixed` is bf16 with an fp32 master, in FSDP2 fp32 shards.

        From stage 1 on ours keeps the master alone, and casts it as it is gathered. Where the
        optimizer `offloads`, the master is on the host.
        """
        if precision is Precision.BF16:
            return cls(2, 2, 2, 0)
        if precision is Precision.MIXED and offloads:
            return cls(2, 2, 4, 0)
        if precision is Precision.MIXED and engine in (Engine.PEAKMARK, Engine.DEEPSPEED):
            is_master_alone = engine is Engine.PEAKMARK and stage > 0
            return cls(4, 2, 4, 0) if is_master_alone else cls(2, 2, 4, 4)
        return cls(4, 4, 4, 0)


def parameter_stage(spec: ModelSpec, stage: int) -> int:
    """The stage as far as parameters of our engine go: 1 and 2 are as 0 where a model is split.

    None of our engines runs a split model: it is predicted as Megatron-LM's distributed optimizer
    keeps it, whole in 16 bits beside sharded master weights.
    """
    return 0 if stage < 3 and isinstance(spec, RankSpec) else stage


def _ceil_div(numerator: Any, denominator: Any) -> Any:
    return -(-numerator // denominator)


def _larger(one: Any, other: Any) -> Any:
    """The larger one, elementwise over arrays; of two integers much sooner than NumPy finds it."""
    are_integers = isinstance(one, int) and isinstance(other, int)
    return max(one, other) if are_integers else np.maximum(one, other)


def tied_shares(place: Place, precision: Precision) -> int:
    """Gradients of a tied weight that autograd holds beside the one of the running section.

    Both shares are summed into a third tensor, under autocast into the head's (see `replay`).
    """
    after_loss = place.in_backward and place.section != "loss_backward"
    joins_apart = precision is not Precision.AUTOCAST
    return after_loss + (joins_apart and place.section == "embed_backward")


def first_finished(place: Place, num_layers: int) -> int:
    """The lowest layer whose backward is over before `place` begins; `num_layers` if none is."""
    if place.section == "layer_backward":
        return place.layer + 1
    return 0 if place.section == "embed_backward" else num_layers


def compute_bytes(precision: Precision) -> int:
    """Bytes of an element of whole parameters in our engine."""
    return 2 if precision in (Precision.MIXED, Precision.BF16) else 4


def reduction_bytes(
    precision: Precision, reduce_dtype: ReduceDtype, gradient_bytes: int
) -> tuple[int, int]:
    """Bytes of an element as our engine reduces gradients, and as it keeps them reduced.

    Beside an fp32 master they stay in the reduction's dtype, bf16 is stepped with bf16.
    """
    sent = _CHOSEN_BYTES.get(reduce_dtype, gradient_bytes)
    return sent, (sent if precision is Precision.MIXED else gradient_bytes)


class Gathered:
    """Elements of groups that stage 3 has whole at each place: those in use and the next unit's.

    The head's unit has a tied embedding too. Below `first_trained` no backward comes.
    """

    def __init__(
        self, whole: GroupSizes, num_layers: int, is_tied: bool, first_trained: int
    ) -> None:
        self._whole, self._layers, self._first_trained = whole, num_layers, first_trained
        self._head = whole.head + (whole.embedding if is_tied else 0)

    def at(self, place: Place) -> Any:
        """What is whole at `place`."""
        layers = self._whole.layers
        if place.section == "embed":
            return self._whole.embedding + layers[0]
        if place.section == "layer":
            following = place.layer + 1
            return layers[place.layer] + (
                layers[following] if following < self._layers else self._head
            )
        if place.section == "layer_backward":
            if place.layer < self._first_trained:
                return 0
            below = layers[place.layer - 1] if place.layer > self._first_trained else 0
            return layers[place.layer] + below
        return 0 if place.section == "embed_backward" else self._head

    def ahead_of_backward(self) -> Any:
        """The last layer, which comes as the head's backward begins behind that of the loss."""
        return self._whole.layers[self._layers - 1]


class GatheredOnce:
    """Elements that stages 1 and 2 have whole at each place, beyond their shards.

    Gathered one unit ahead in the first forward, and freed in the last micro-batch's backward as
    gradients come; the embedding before it, unless the head is tied to it. Where a step
    `accumulates`, the highest of its micro-batches is one that finds all whole and frees nothing.
    """

    def __init__(
        self, whole: GroupSizes, num_layers: int, is_tied: bool, accumulates: bool
    ) -> None:
        self._whole, self._layers, self._accumulates = whole, num_layers, accumulates
        self._tied = whole.embedding if is_tied else 0

    def at(self, place: Place) -> Any:
        """What is whole at `place`."""
        whole, layers = self._whole, self._whole.layers
        if self._accumulates or place.section in ("head", "loss"):
            return whole.total()
        if place.section == "embed":
            return whole.embedding + layers[0]
        if place.section == "layer":
            ahead = layers.total(0, place.layer + 2)
            is_last = place.layer == self._layers - 1
            return whole.embedding + ahead + (whole.head if is_last else 0)
        if place.section == "loss_backward":
            return layers.total() + whole.head + self._tied
        return self._tied + layers.total(0, first_finished(place, self._layers))

    def ahead_of_backward(self) -> Any:
        """Nothing: all that the backward uses is there."""
        return 0


def minus(left: GroupSizes, right: GroupSizes) -> GroupSizes:
    """Subtract group by group the sizes of one model's groups."""
    sizes = zip(left.layers.sizes, right.layers.sizes, strict=True)
    layers = PerLayer(left.layers.kinds, tuple(one - other for one, other in sizes))
    return GroupSizes(left.embedding - right.embedding, layers, left.head - right.head)


def frozen_groups(kept: GroupSizes, itemsize: int | None = None) -> list[HeldGroup]:
    """What is kept of each kind of group without being trained; nothing of it is stepped."""
    groups = [("embedding", 1, kept.embedding), *kept.layers.by_kind(), ("head", 1, kept.head)]
    return [
        HeldGroup(f"frozen {name}", count, size, 0, (), itemsize)
        for name, count, size in groups
        if size
    ]


class PeakmarkStates:
    """Our engine at one stage: what each place of a step holds beside the model's tensors."""

    gradients = "added"
    offloads = False

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

        `trained` says what of the model is, where not all is.
        """
        self._gathers = parameter_stage(spec, stage)
        self._bytes = Precisions.of(precision, Engine.PEAKMARK, self._gathers, self.offloads)
        self._sent, self._kept = reduction_bytes(precision, reduce_dtype, self._bytes.gradient)
        # Gradients that are cast to be reduced are sharded at stage 1 too.
        self._shards = stage >= 2 or (stage == 1 and self._sent != self._bytes.gradient)
        self._precision, self._compute = precision, compute_bytes(precision)
        self._stage, self._accumulates = stage, accumulates
        # Stages 0 and 1 reduce after the last micro-batch anyway.
        self._keeps_whole = accumulates and (stage < 2 or not syncs)
        self._layers = spec.num_layers
        self._embeds_once = len(group_shapes(spec)["embedding"]) == 1
        has_tied_gradients = spec.tie_word_embeddings and trained is None
        self._tied_numel = spec.vocab_size * spec.hidden_size if has_tied_gradients else 0
        # Experts that several ranks split have fewer ranks to be sharded over.
        numels, spread = group_numels(spec), group_numels(with_all_experts(spec))
        self._frozen: GroupSizes | None = None
        first_trained = 0
        if trained is not None:
            self._frozen, first_trained = trained.frozen, trained.first_layer
            numels = spread = trained.trained
        self.shard = spread.map(lambda numel: _ceil_div(numel, world_size))
        self.padded = numels.map(lambda numel: _ceil_div(numel, world_size) * world_size)
        units = spec.num_layers, spec.tie_word_embeddings, first_trained
        self._gathered: list[Gathered | GatheredOnce] = []
        # A shard of the same dtype is in the whole group alone while that is there.
        self._moves = self._gathers in (1, 2) and self._bytes.parameter == self._compute
        if self._gathers in (1, 2):
            more = minus(self.padded, self.shard) if self._moves else self.padded
            self._gathered = [GatheredOnce(more, *units[:2], accumulates)]
        elif stage == 3:
            self._gathered = [Gathered(self.padded, *units)]
        if self._frozen is not None:
            frozen = self._frozen.map(lambda numel: _ceil_div(numel, world_size))
            whole = frozen.map(lambda size: size * world_size)
            self._gathered += [Gathered(whole, *units)] if stage == 3 else []
            self._frozen = frozen if stage == 3 else whole
        self._optimizer = optimizer
        self._parameters = self.shard if self._gathers else self.padded
        self._gradient_numels = self.shard if self._shards else self.padded
        self._stepped = self.padded if stage == 0 else self.shard
        self._tensors = stepped_groups(spec, optimizer, self._stepped, self._bytes.state)
        self._states = self._tensors.map(lambda tensors: optimizer_states(optimizer, tensors))

    def persistent(self) -> Parts:
        """Parameters and optimizer states, in bytes."""
        state_bytes = self._states.map(lambda states: sum(s.size_bytes for s in states))
        frozen = self._frozen.total() if self._frozen else 0
        kept_bytes = self._parameters.total() * self._bytes.parameter
        return {
            "parameters": kept_bytes + frozen * self._compute,
            "optimizer": self._stepped.total() * self._bytes.master + state_bytes.total(),
        }

    def held_numels(self) -> list[HeldGroup]:
        """Per kind of group, the parameters kept and what the optimizer steps."""
        kept, stepped, states = self._parameters, self._stepped, self._states
        sizes = zip(kept.layers.by_kind(), stepped.layers.sizes, states.layers.sizes, strict=True)
        layers = [HeldGroup(name, count, size, *more) for (name, count, size), *more in sizes]
        groups = [
            HeldGroup("embedding", 1, kept.embedding, stepped.embedding, states.embedding),
            *layers,
            HeldGroup("head", 1, kept.head, stepped.head, states.head),
        ]
        if self._frozen is None:
            return groups
        frozen = frozen_groups(self._frozen, self._compute)
        return [*(group for group in groups if group.kept), *frozen]

    def at(self, place: Place) -> Parts:
        """Gathered parameters and gradients of groups begun before `place`, in bytes."""
        return {
            "gathered": sum(groups.at(place) for groups in self._gathered) * self._compute,
            "gradients": self._gradients(place),
            # Autograd holds the head's share of a tied weight until the embedding's is there.
            "temporary": tied_shares(place, self._precision)
            * self._tied_numel
            * self._bytes.gradient,
        }

    def _gradients(self, place: Place) -> Any:
        numels = self._gradient_numels
        if self._keeps_whole:
            # As the last layer's backward runs, nothing is freed of the head's yet.
            is_next = place == Place("layer_backward", self._layers - 1)
            more = (self._reads(place) and is_next) * (
                self.shard.head * self._kept
                + self.padded.head * (self._sent - self._bytes.gradient)
            )
            return self.padded.total() * self._bytes.gradient + more
        read = self._whole_before(place) * self._sent if self._reads(place) else 0
        if self._accumulates:
            return numels.total() * self._kept + read
        if not place.in_backward:
            return 0
        done = numels.layers.total(first_finished(place, self._layers))
        if place.section != "loss_backward":
            done = done + numels.head
        return done * self._kept + read

    def _reads(self, place: Place) -> bool:
        """Whether a reduction reads the whole gradient of the group before `place`."""
        return self._shards and place.in_backward and place.section != "loss_backward"

    def _whole_before(self, place: Place) -> Any:
        """Elements of the group whose backward was the last before `place`."""
        above = first_finished(place, self._layers)
        return self.padded.head if above == self._layers else self.padded.layers[above]

    def flat(self, place: Place) -> tuple[Any, ...]:
        """Bytes of the flat gradient that begins in `place`, per entry of FLAT_GROUPS.

        It is kept over micro-batches, or made anew for each where each is reduced.
        """
        if self._keeps_whole:
            return (0, 0, 0)
        padded = self.padded
        sizes = [padded.embedding, padded.layers[place.layer], padded.head]
        if place.section == "embed_backward" and self._embeds_once:
            # The buffer begins when only the sum of a tied weight's shares is left. With learned
            # positions it begins before, at their gradient.
            sizes[0] = sizes[0] - tied_shares(place, self._precision) * self._tied_numel
        return tuple(size * self._bytes.gradient for size in sizes)

    def behind_loss(self) -> Parts:
        """The last layer is gathered once the loss is behind, as the head's backward begins."""
        ahead = sum(groups.ahead_of_backward() for groups in self._gathered)
        return {"gathered": ahead * self._compute}

    def at_section_end(self, place: Place) -> Parts:
        """What the reduction of the finished group adds at the end of a backward section, in bytes.

        Its shard comes as what the group before it held goes.
        """
        if not place.in_backward:
            return {}
        named = {"loss_backward": "head", "embed_backward": "embedding"}
        group = named.get(place.section, "layer")
        shard, whole = (sizes.of(group, place.layer) for sizes in (self.shard, self.padded))
        frees = self._gathers in (1, 2) and not self._accumulates
        # Before the whole group goes, its shard is copied out of it.
        most = shard * self._bytes.parameter if self._moves and frees else 0
        if self._shards and not (self._keeps_whole and group != "head"):
            # Without a reduction each time the last micro-batch has freed more than this by then.
            more = shard * self._kept + whole * (self._sent - self._bytes.gradient)
            if group != "head":
                more = more - self._whole_before(place) * self._sent
            most = _larger(most, more - frees * whole * self._compute)
        return {"gradients": most}

    def optimizer_step(self) -> Parts:
        """Gradients and temporaries while the largest group's optimizer steps, in bytes."""
        casts = self._bytes.state != self._kept and casts_gradients(self._optimizer)
        cast_bytes = self._bytes.state if casts else 0
        numels, tensors = self._stepped, self._tensors
        groups = [
            (numels.embedding, tensors.embedding),
            *zip(numels.layers.sizes, tensors.layers.sizes, strict=True),
            (numels.head, tensors.head),
        ]
        temporary = (
            numel * cast_bytes + temporaries_peak_bytes(self._optimizer, group)
            for numel, group in groups
        )
        return {
            "gradients": self._gradient_numels.total() * self._kept,
            "temporary": reduce(_larger, temporary),
        }
