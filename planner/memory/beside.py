"""What one GPU of a model-parallel group holds beside its part of the model and the engine.

Sequence parallelism: Korthikanti et al. 2022 (inputs are gathered, and again in the backward).
Pipeline: Narayanan et al. 2021 (one forward and one backward in turn, 1F1B). Ring attention: Liu et
al. 2023. Experts over data-parallel ranks: Lepikhin et al. 2020 (tokens exchanged all-to-all).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.memory.groups import Place
from planner.memory.ledger import Entry
from planner.memory.states import Parts
from planner.model import ModelSpec
from planner.workload import Parallelism, Precision, TrainingWorkload

_DTYPES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A collective's buffer [tokens, width]; `tokens` may be an array."""

    name: str
    tokens: Any
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Buffers of collectives inside the layers, and what other micro-batches in flight keep.

    `tokens` are this GPU's of one micro-batch, `itemsize` the bytes of a compute element. `others`
    are the bytes by part that `num_others` micro-batches keep for their backward. `finds_gradients`
    says whether an earlier micro-batch of the step has left some.
    """

    spec: ModelSpec
    parallelism: Parallelism
    itemsize: int
    tokens: Any
    num_others: int
    others: Parts
    finds_gradients: bool

    def parts(self, place: Place) -> Parts:
        """Bytes by part at a place of the step."""
        temporary_bytes = self.others.get("temporary", 0) + sum(self.buffers_bytes(place))
        return {**self.others, "temporary": temporary_bytes}

    def buffers_bytes(self, place: Place) -> list[Any]:
        """Bytes of each buffer alive at a place of the step."""
        return [buffer.tokens * buffer.width * self.itemsize for buffer in self._buffers(place)]

    def entries(self, place: Place) -> tuple[Entry, ...]:
        """The same as rows of the ledger (no arrays)."""
        if place.section == "optimizer":
            return ()
        buffers = (self._entry(buffer) for buffer in self._buffers(place))
        kept = (self._kept_entry(part, round(size)) for part, size in self.others.items() if size)
        return (*buffers, *kept)

    def _entry(self, buffer: Buffer) -> Entry:
        tokens = int(buffer.tokens)
        return Entry(
            name=buffer.name,
            shape=(tokens, buffer.width),
            dtype=_DTYPES[self.itemsize],
            count=1,
            size_bytes=tokens * buffer.width * self.itemsize,
            component="temporary",
            owner="collective",
            phases=(),
            formula=f"{tokens:,} tokens x {buffer.width:,} x {self.itemsize} B",
        )

    def _kept_entry(self, part: str, size_bytes: int) -> Entry:
        return Entry(
            name=f"{part} of other micro-batches in flight",
            shape=(),
            dtype="",
            count=self.num_others,
            size_bytes=size_bytes,
            component=part,
            owner="saved for backward",
            phases=(),
            formula=f"{self.num_others} micro-batches whose backward is to come",
        )

    def _buffers(self, place: Place) -> Iterator[Buffer]:
        gathers = place.in_layer or place.section in ("head", "loss_backward")
        if self.parallelism.sequence_parallel and gathers:
            yield from self._gathered(place)
        if self.parallelism.context_parallel > 1 and place.in_layer:
            yield from self._ring(place)
        routes = place.in_layer and self.spec.expert_layers[place.layer]
        if self.parallelism.expert_parallel > 1 and routes:
            yield from self._routed()

    def _gathered(self, place: Place) -> Iterator[Buffer]:
        hidden = self.spec.hidden_size
        yield Buffer("input gathered over tensor-parallel GPUs", self.tokens, hidden)
        summed = "gradient of the gathered input" if place.in_backward else "output"
        yield Buffer(f"{summed} before its reduce-scatter", self.tokens, hidden)

    def _ring(self, place: Place) -> Iterator[Buffer]:
        both = 2 * self.spec.kv_size
        yield Buffer("keys and values received in the ring", self.tokens, both)
        if place.in_backward:
            yield Buffer("gradients of keys and values in the ring", self.tokens, both)

    def _routed(self) -> Iterator[Buffer]:
        routed = self.tokens * self.spec.experts_per_token
        for name in ("tokens sent to experts", "tokens received by experts"):
            yield Buffer(name, routed, self.spec.hidden_size)


def one_stage_beside(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism
) -> Beside:
    """What is beside a GPU's part of a model that no pipeline splits; `workload` is the GPU's own."""
    return Beside(
        spec=spec,
        parallelism=parallelism,
        itemsize=compute_itemsize(workload.precision),
        tokens=workload.micro_batch * workload.sequence_length,
        num_others=0,
        others={},
        finds_gradients=workload.grad_accumulation > 1,
    )


def compute_itemsize(precision: Precision) -> int:
    """Bytes of an element as the collectives inside a model carry it."""
    return 4 if precision is Precision.FP32 else 2
