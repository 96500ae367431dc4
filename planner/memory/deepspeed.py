"""Bytes that DeepSpeed's ZeRO stages 1 to 3 hold at each place of a step, with default buckets.

Read in deepspeed 0.19.8: runtime/zero/stage_1_and_2.py (one flat buffer of all parameters, padded to
twice the world size) and runtime/zero/stage3.py (every parameter padded by itself). bf16 with fp32
master weights; gradients are accumulated in bf16, the model's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from planner.memory.ddp import model_order
from planner.memory.deepspeed_fetch import steady_fetches
from planner.memory.groups import BACKWARD_SECTIONS, Place, group_numels, group_tensors
from planner.memory.optimizers import Stepped, optimizer_states, temporaries_peak_bytes
from planner.memory.states import HeldGroup, Parts, first_finished, tied_shares
from planner.model import ModelSpec
from planner.workload import Optimizer, Precision

BF16_BYTES, FP32_BYTES, FP64_BYTES = 2, 4, 8
# reduce_bucket_size and sub_group_size, in elements.
BUCKET_NUMEL, SUB_GROUP_NUMEL = 500_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Partition:
    """What one world size makes of the parameters, in elements, for rank 0.

    `shard` is stepped by a rank, `stepped` in these pieces. `own` are the whole parameters of which rank 0 owns something (stages
    1 and 2 keep their gradients whole), `largest_own` the largest piece.
    """

    padded: int
    shard: int
    own: int
    largest_own: int
    num_own: int
    stepped: tuple[int, ...]


@lru_cache(maxsize=512)
def flat_partition(spec: ModelSpec, world_size: int) -> Partition:
    """Stages 1 and 2: one flat buffer, cut into equal pieces."""
    numels = [tensor.numel for _, tensor in model_order(spec, BF16_BYTES)]
    padded = -(-sum(numels) // (2 * world_size)) * 2 * world_size
    shard, offset, own = padded // world_size, 0, []
    for numel in numels:
        if offset < shard:
            own.append((numel, min(numel, shard - offset)))
        offset += numel
    pieces = [piece for _, piece in own]
    return Partition(
        padded=padded,
        shard=shard,
        own=sum(numel for numel, _ in own),
        largest_own=max(pieces),
        num_own=len(own),
        stepped=(shard,),
    )


@lru_cache(maxsize=512)
def sharded_partition(spec: ModelSpec, world_size: int) -> Partition:
    """Stage 3: ceil(elements / N) of every parameter."""
    shards = [-(-tensor.numel // world_size) for _, tensor in model_order(spec, BF16_BYTES)]
    total = sum(shards)
    return Partition(
        padded=total * world_size,
        shard=total,
        own=total,
        largest_own=max(shards),
        num_own=len(shards),
        stepped=_sub_groups(shards),
    )


def _sub_groups(shards: list[int]) -> tuple[int, ...]:
    """Whole shards of parameters, until they are a sub-group or more (`_create_fp16_sub_groups`)."""
    groups, open_numel = [], 0
    for numel in shards:
        open_numel += numel
        if open_numel >= SUB_GROUP_NUMEL:
            groups.append(open_numel)
            open_numel = 0
    return (*groups, open_numel) if open_numel else tuple(groups)


class Bucket(NamedTuple):
    """Gradients that are reduced at once: `numel` elements of the model's order from `start` on."""

    start: int
    numel: int

    @property
    def is_large(self) -> bool:
        """Whether it is one gradient that no bucket holds: it is reduced where it is."""
        return self.numel > BUCKET_NUMEL

    def copies(self, shard: int) -> list[int]:
        """Elements of each copy that reducing it makes at stages 1 and 2.

        Slices of several ranks are made one tensor, as soon as they are more than a bucket holds; a
        single slice is one already (allreduce_and_scatter, and allreduce_bucket, whose `flatten`
        leaves a single tensor as it is).
        """
        copies, position, end = [], self.start, self.start + self.numel
        num_slices, first = 0, position
        while position < end:
            position = min(end, (position // shard + 1) * shard)
            num_slices += 1
            if position - first > BUCKET_NUMEL or position == end:
                if num_slices > 1:
                    copies.append(position - first)
                num_slices, first = 0, position
        return copies

    def copies_at_stage_3(self) -> list[int]:
        """All gradients are interleaved in one buffer; one alone is that (reduce_scatter_coalesced)."""
        return [] if self.is_large else [self.numel]

    def largest_copy(self, shard: int) -> int:
        """Elements of the largest copy, 0 if it makes none."""
        return max(self.copies(shard), default=0)


@lru_cache(maxsize=64)
def reductions(spec: ModelSpec) -> dict[Place, tuple[Bucket, ...]]:
    """The buckets reduced at each place, gradients coming in the model's order reversed.

    A gradient larger than a bucket is reduced by itself.
    """
    found: dict[Place, tuple[Bucket, ...]] = {}
    arrivals = _arrivals(spec)
    start = sum(numel for _, numel in arrivals)
    filled = 0
    for place, numel in arrivals:
        if filled + numel > BUCKET_NUMEL and filled:
            found[place] = (*found.get(place, ()), Bucket(start, filled))
            filled = 0
        start -= numel
        filled += numel
    last = Place("embed_backward")
    return {**found, last: (*found.get(last, ()), Bucket(start, filled))}


@lru_cache(maxsize=64)
def buckets_after_backward(spec: ModelSpec) -> tuple[Bucket, ...]:
    """Stage 1's buckets: it fills them in the model's order once the backward is over."""
    found: list[Bucket] = []
    start = filled = 0
    for tensor in (tensor for _, tensor in model_order(spec, BF16_BYTES)):
        if filled + tensor.numel > BUCKET_NUMEL and filled:
            found.append(Bucket(start, filled))
            start, filled = start + filled, 0
        filled += tensor.numel
    return (*found, Bucket(start, filled))


def _arrivals(spec: ModelSpec) -> list[tuple[Place, int]]:
    shapes = group_tensors(spec)
    backward = [
        (Place("loss_backward"), shapes["head"]),
        *reversed([(Place("layer_backward", i), own) for i, own in enumerate(shapes["layers"])]),
        (Place("embed_backward"), shapes["embedding"]),
    ]
    return [(place, prod(shape)) for place, group in backward for shape in reversed(group)]


def per_world(world_size: Any, value: Callable[[int], Any]) -> Any:
    """Evaluate `value` for one world size or for each of an array of them."""
    worlds = np.asarray(world_size)
    values = [value(int(n)) for n in worlds.flat]
    return np.array(values).reshape(worlds.shape) if worlds.ndim else values[0]


class DeepSpeedStates:
    """DeepSpeed at stage 1, 2 or 3 in its steady state: from the second step, at stage 3 the third.

    At stages 2 and 3 a gradient is copied into the bucket and freed as it comes; at stage 1 all
    gradients are kept to the end of the backward. What reducing a bucket takes is counted at the end of
    the section in which it fills, so a peak in the middle of that section can be a little higher.
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
        recomputes: bool = False,
    ) -> None:
        self._spec, self._precision, self._optimizer = spec, precision, optimizer
        self._stage, self._accumulates = stage, accumulates
        self._world_size = world_size
        self.gradients = "kept" if stage == 1 and not accumulates else "added"
        self._numels = group_numels(spec)
        self._tied_numel = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
        self._cut = sharded_partition if stage == 3 else flat_partition
        self._fetches = steady_fetches(spec, recomputes) if stage == 3 else None
        self._shard = self._of(lambda part: part.shard)
        self._own = self._of(lambda part: part.own)
        self._bucket_bytes = BUCKET_NUMEL * BF16_BYTES

    def _of(self, value: Callable[[Partition], Any]) -> Any:
        return per_world(self._world_size, lambda n: value(self._cut(self._spec, n)))

    def _stepped(self) -> Stepped:
        return Stepped((self._shard,), FP32_BYTES)

    def persistent(self) -> Parts:
        """Parameters, master weights and states; at stage 3 also its gradients and its bucket."""
        states = optimizer_states(self._optimizer, [self._stepped()])
        parts: Parts = {
            "parameters": self._kept() * BF16_BYTES,
            "optimizer": self._shard * FP32_BYTES + sum(state.size_bytes for state in states),
        }
        if self._fetches is not None:
            whole = np.not_equal(self._world_size, 1) * self._fetches.persistent_numel
            parts["gathered"] = whole * BF16_BYTES
            parts["gradients"] = self._shard * BF16_BYTES + self._bucket_bytes
        return parts

    def _kept(self) -> Any:
        return self._shard if self._stage == 3 else self._of(lambda part: part.padded)

    def held_numels(self) -> list[HeldGroup]:
        """All parameters are one group."""
        states = optimizer_states(self._optimizer, [self._stepped()])
        return [HeldGroup("flat", 1, self._kept(), self._shard, states)]

    def at(self, place: Place) -> Parts:
        """Gathered parameters and gradients begun before `place`, in bytes."""
        return {
            "gathered": self._gathered(place),
            "gradients": self._gradients(place),
            "temporary": tied_shares(place, self._precision) * self._tied_numel * BF16_BYTES,
        }

    def _gathered(self, place: Place) -> Any:
        if self._fetches is None:
            return 0
        place = Place("head") if place.section == "loss" else place
        live = self._fetches.live.get(place, 0)
        return np.not_equal(self._world_size, 1) * live * BF16_BYTES

    def _gradients(self, place: Place) -> Any:
        if self._stage == 3:
            return 0
        bucket = self._bucket_bytes * (place.in_backward and place.section != "loss_backward")
        if self._stage == 1:
            return bucket + self._whole_gradients(place) * BF16_BYTES
        kept = self._own if self._accumulates else 0
        made = self._of(partial(self._own_before, place))
        return bucket + (kept + made) * BF16_BYTES

    def _whole_gradients(self, place: Place) -> Any:
        if self._accumulates:
            return self._numels.total()
        done = self._numels.layers.total(first_finished(place, self._spec.num_layers))
        after_loss = place.in_backward and place.section != "loss_backward"
        return (done if place.in_backward else 0) + after_loss * self._numels.head

    def _own_before(self, place: Place, part: Partition) -> int:
        """Elements that rank 0 keeps of gradients reduced before `place`: all once one was its own."""
        if not place.in_backward:
            return 0
        order = BACKWARD_SECTIONS.index

        def is_before(other: Place) -> bool:
            same = order(other.section) == order(place.section)
            return (
                other.layer > place.layer if same else order(other.section) < order(place.section)
            )

        before = (b for at, found in reductions(self._spec).items() if is_before(at) for b in found)
        return part.own if any(bucket.start < part.shard for bucket in before) else 0

    def flat(self, place: Place) -> tuple[Any, ...]:
        """The bucket begins with the first gradient: the head's."""
        begins = self._stage != 3 and place.section == "loss_backward"
        return (0, 0, self._bucket_bytes if begins else 0)

    def behind_loss(self) -> Parts:
        """Nothing more: what the backward uses is there before."""
        return {}

    def at_section_end(self, place: Place) -> Parts:
        """What reducing the buckets of this place takes, in bytes."""
        if not place.in_backward:
            return {}
        if self._stage == 1:
            reduced = self._after_backward if place.section == "embed_backward" else None
        else:
            reduced = partial(self._while_reducing, place)
        return {"temporary": self._of(reduced) * BF16_BYTES if reduced else 0}

    def _while_reducing(self, place: Place, part: Partition) -> int:
        """Elements beside the gradients as a place's buckets are reduced, at the most.

        The bucket's copy or, after the first, the gradients that rank 0 keeps, with a gradient
        larger than a bucket, which waits outside of it.
        """
        buckets = reductions(self._spec).get(place, ())
        if self._stage == 3:
            return max((n for bucket in buckets for n in bucket.copies_at_stage_3()), default=0)
        most, own = 0, self._own_before(place, part)
        begun = own
        for bucket in buckets:
            waiting = bucket.numel * bucket.is_large
            most = max(most, own - begun + waiting + bucket.largest_copy(part.shard))
            own = part.own if bucket.start < part.shard else own
            most = max(most, own - begun + waiting)
        return most

    def _after_backward(self, part: Partition) -> int:
        """Elements beside all gradients as stage 1 empties them into buckets, at the most."""
        most = freed = own = 0
        for bucket in buckets_after_backward(self._spec):
            freed += bucket.numel * (not bucket.is_large)
            most = max(most, own - freed + bucket.largest_copy(part.shard), part.own - freed)
            freed += bucket.numel * bucket.is_large
            own = part.own
        return most

    def optimizer_step(self) -> Parts:
        """Averaged gradients; their norm in fp64, or their flat copy and the fp32 gradient."""
        gradients = 0 if self._stage == 3 else self._own * BF16_BYTES
        stepped = self._of(lambda part: max(part.stepped))
        several = self._of(lambda part: part.num_own > 1)
        cast = (FP32_BYTES + several * BF16_BYTES) * stepped
        norm = self._of(lambda part: part.largest_own) * FP64_BYTES
        called = temporaries_peak_bytes(self._optimizer, [Stepped((stepped,), FP32_BYTES)])
        inside = FP32_BYTES * stepped + called - gradients
        temporary = np.maximum(np.maximum(norm, cast), inside)
        return {"gradients": gradients, "temporary": temporary}
