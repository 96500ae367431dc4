"""What DeepSpeed's ZeRO stages allocate around a model's sections (see `replay`)."""

from __future__ import annotations

from typing import Any

from planner.memory.ddp import model_order
from planner.memory.deepspeed import (
    BF16_BYTES,
    BUCKET_NUMEL,
    FP32_BYTES,
    FP64_BYTES,
    Bucket,
    buckets_after_backward,
    flat_partition,
    sharded_partition,
)
from planner.memory.deepspeed_fetch import (
    PERSISTENT_NUMEL,
    Event,
    Step,
    first_fetches,
    steady_fetches,
)
from planner.memory.groups import Place
from planner.memory.optimizers import Stepped
from planner.memory.replay import Blocks, Memory
from planner.memory.replay_base import EngineBase
from planner.memory.sections import FLAT_GROUPS
from planner.model import ModelSpec
from planner.workload import Checkpointing, Parallelism, TrainingWorkload

_GATHER_STREAM, _REDUCE_STREAM = 1, 2
_BUCKET_BYTES = BUCKET_NUMEL * BF16_BYTES
_HEAD = FLAT_GROUPS.index("flat_head")


class DeepSpeedReplay(EngineBase):
    """Fetches and reductions are made at the borders of the sections in which they fall."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: TrainingWorkload,
        parallelism: Parallelism,
        memory: Memory,
        workspaces_bytes: int,
    ) -> None:
        super().__init__(spec, workload, memory, workspaces_bytes)
        self._stage, self._ranks = parallelism.zero_stage, parallelism.world_size
        self._numels = [tensor.numel for _, tensor in model_order(spec, BF16_BYTES)]
        cut = sharded_partition if self._stage == 3 else flat_partition
        self._part = cut(spec, self._ranks)
        self._spec = spec
        self.follows_gradients = self._stage != 1
        # The gradients that came last and are not reduced, as elements of the model's order.
        self._first = sum(self._numels)
        self._filled = 0
        recomputes = workload.checkpointing is Checkpointing.FULL
        self._fetches = steady_fetches(spec, recomputes) if self._gathers else None
        self._events = first_fetches(spec, recomputes) if self._gathers else {}
        self._kept: Blocks = []
        self._waiting: Any = None
        self._is_last = True

    @property
    def _gathers(self) -> bool:
        return self._stage == 3 and self._ranks > 1

    def start(self) -> None:
        """Whole parameters, then what the stage makes of them."""
        memory, part = self._memory, self._part
        for number, numel in enumerate(self._numels):
            memory.take(("parameter", number), numel * BF16_BYTES)
        if self._tied:
            memory.take("untied", self._numels[0] * BF16_BYTES)
            memory.give("untied")
        if self._stage == 3:
            self._shard_parameters()
        else:
            memory.allocator.empty_cache()  # as DeepSpeed does before it makes the flat buffer
            memory.take("flat", part.padded * BF16_BYTES)
            memory.give(*(("parameter", number) for number in range(len(self._numels))))
        self._make_masters()
        if self._stage == 3:
            memory.take("bucket", _BUCKET_BYTES)
            memory.take("gradients", part.shard * BF16_BYTES)
            self._hook_parameters()
        self._take_tokens()

    def _make_masters(self) -> None:
        """A clone in between, and the gradients that the optimizer is introduced to."""
        memory, groups = self._memory, self._part.stepped
        between = FP32_BYTES if self._stage == 3 else BF16_BYTES
        for number, stepped in enumerate(groups):
            memory.take("clone", stepped * between)
            memory.take(("master", number), stepped * FP32_BYTES)
            memory.give("clone")
        memory.take("gradient", max(groups) * FP32_BYTES)
        memory.give("gradient")

    def _shard_parameters(self) -> None:
        """Shard one by one, then all through the host into one buffer (`defragment`)."""
        memory = self._memory
        for number, numel in enumerate(self._numels):
            memory.take(("shard", number), -(-numel // self._ranks) * BF16_BYTES)
            memory.give(("parameter", number))
        memory.give(*(("shard", number) for number in range(len(self._numels))))
        memory.allocator.empty_cache()
        memory.take("flat", self._part.shard * BF16_BYTES)

    def _hook_parameters(self) -> None:
        """Every parameter is gathered once to hook its gradient; small ones stay."""
        if not self._gathers:
            return
        for number, numel in enumerate(self._numels):
            kept = ("small", number) if numel <= PERSISTENT_NUMEL else "hooked"
            size_bytes = -(-numel // self._ranks) * self._ranks * BF16_BYTES
            self._memory.take(kept, size_bytes)
            self._memory.give("hooked")
            if numel <= PERSISTENT_NUMEL:
                # The first step, which learns the order, fetches and releases these too.
                self._memory.take("fetched", size_bytes, _GATHER_STREAM)
                self._memory.give("fetched")

    def start_micro_batch(self, is_last: bool) -> None:
        """Only the last micro-batch ends in a step; stage 1 reduces in that one alone."""
        super().start_micro_batch(is_last)
        self._is_last = is_last

    def before(self, section: str, layer: int) -> None:
        """Fetch and release parameters as the coordinator does in this section."""
        if section != "loss_backward":
            self._fetch(_place(section, layer))
        self._take_workspace(section)

    def _fetch(self, place: Place) -> None:
        for event in self._events.get(place, ()):
            match event.step:
                case Step.GATHER:
                    self._gather(event)
                case Step.COPY_OUT:
                    for parameter in event.parameters:
                        self._take_whole(parameter.name, parameter.numel)
                case Step.DROP_BUFFER:
                    self._memory.give(("gather", event.call))
                case Step.RELEASE:
                    self._memory.give(*(("whole", p.name) for p in event.parameters))

    def _gather(self, event: Event) -> None:
        if len(event.parameters) == 1:
            self._take_whole(*event.parameters[0])
            return
        numel = sum(-(-p.numel // self._ranks) * self._ranks for p in event.parameters)
        self._memory.take(("gather", event.call), numel * BF16_BYTES, _GATHER_STREAM)

    def _take_whole(self, name: str, numel: int) -> None:
        padded = -(-numel // self._ranks) * self._ranks
        self._memory.take(("whole", name), padded * BF16_BYTES, _GATHER_STREAM)

    def first_gradient(self, group: int, layer: int) -> None:
        """The bucket begins with the backward's first gradient."""
        if group == _HEAD:
            self._memory.take("bucket", _BUCKET_BYTES)

    def gradient(self, size_bytes: int) -> None:
        """Reduce the bucket if it has no room for this gradient, then put it there.

        Gradients are taken to come in the model's order reversed.
        """
        numel = size_bytes // BF16_BYTES
        if self._filled and self._filled + numel > BUCKET_NUMEL:
            self._reduce(Bucket(self._first, self._filled))
            self._filled = 0
        self._first = max(0, self._first - numel)
        self._filled += numel

    def _reduce_rest(self) -> None:
        self._reduce(Bucket(0, self._filled))
        self._first, self._filled = sum(self._numels), 0

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Reduce the buckets that filled; end a micro-batch after the embedding's backward."""
        if not section.endswith("_backward"):
            return
        if section == "loss_backward":
            self._fetch(_place(section, layer))
            self._memory.take("bucket", _BUCKET_BYTES)
        if self._stage == 1:
            self._keep(section, gradients)
        elif section == "embed_backward":
            self._reduce_rest()
        if section == "embed_backward":
            self._end_micro_batch()

    def _keep(self, section: str, gradients: Blocks) -> None:
        """Stage 1: whole gradients until all are reduced, after the last micro-batch.

        They are those that autograd made in the first one; later ones are added to them.
        """
        self._kept += [block for block in gradients if block is not None]
        if section != "embed_backward" or not self._is_last:
            return
        for bucket in buckets_after_backward(self._spec):
            if bucket.is_large:
                self._reduce(bucket)
            self._release_kept(bucket.numel * BF16_BYTES)
            if not bucket.is_large:
                self._reduce(bucket)
        self._release_kept(sum(block.size_bytes for block in self._kept))

    def _release_kept(self, size_bytes: int) -> None:
        """Release the gradients that come first in the model: the backward's last."""
        while self._kept and size_bytes > 0:
            block = self._kept.pop()
            size_bytes -= block.size_bytes
            self._memory.allocator.release(block)

    def _reduce(self, bucket: Bucket) -> None:
        memory, shard = self._memory, self._part.shard
        stream = _REDUCE_STREAM if self._stage == 3 else 0
        copies = bucket.copies_at_stage_3() if self._stage == 3 else bucket.copies(shard)
        for numel in copies:
            memory.take("copy", numel * BF16_BYTES, stream)
            memory.give("copy")
        if self._stage != 3 and bucket.start < shard:
            added = memory.holds("own") and self._stage == 2 and self._is_later
            memory.take("added" if added else "own", self._part.own * BF16_BYTES)
        if bucket.is_large and self._waiting is not None:
            memory.allocator.release(self._waiting)
            self._waiting = None

    def keeps(self, gradient: Any) -> bool:
        """A gradient larger than a bucket waits where it is until it is reduced."""
        if self._stage == 1 or gradient.size_bytes <= _BUCKET_BYTES:
            return False
        self._waiting = gradient
        return True

    @property
    def _is_later(self) -> bool:
        return self._workload.grad_accumulation > 1 and self._is_last

    def _end_micro_batch(self) -> None:
        memory = self._memory
        memory.give("added")
        if self._stage != 3 and (self._stage == 2 or self._is_last):
            memory.give("bucket")
        if self._fetches is not None:
            everything = [e for events in self._events.values() for e in events]
            memory.give(*{("gather", e.call) for e in everything})
            memory.give(*{("whole", p.name) for e in everything for p in e.parameters})
            self._events = self._fetches.events

    def optimizer_step(self) -> None:
        """The gradients' norm in fp64, the fp32 gradient, the step."""
        memory, part = self._memory, self._part
        memory.take("norm", part.largest_own * FP64_BYTES)
        memory.give("norm")
        for number, shard in enumerate(part.stepped):
            if part.num_own > 1:
                memory.take("flat gradient", shard * BF16_BYTES)
            memory.take("fp32 gradient", shard * FP32_BYTES)
            memory.give("flat gradient", "own")
            self._step_tensors(number, [Stepped((shard,), FP32_BYTES)])
            memory.give("fp32 gradient")


def _place(section: str, layer: int) -> Place:
    if "layer" not in section:
        return Place(section)
    return Place("layer_backward" if section.endswith("_backward") else "layer", layer)
