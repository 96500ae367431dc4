"""What DDP and ZeroRedundancyOptimizer allocate around a model's sections (see `replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.memory.adapters import trained_groups
from planner.memory.ddp import bucket_bytes, in_order, model_order, owned
from planner.memory.nf4 import nf4_tensors
from planner.memory.optimizers import tensor_states
from planner.memory.replay import Blocks, Memory
from planner.memory.replay_base import EngineBase
from planner.memory.states import Precisions
from planner.model import ModelSpec
from planner.units import GIB_BYTES, MIB_BYTES
from planner.workload import Parallelism, TrainingWorkload

# DDP broadcasts the first values in flat pieces of this size, two at a time.
_BROADCAST_BYTES = 250 * MIB_BYTES
_IN_FLIGHT = 2
_BF16_BYTES = 2
_FIRST_BUCKET = ("bucket", "first")
# NCCL's watchdog looks every 100 ms at what has finished and lets go of its tensors with the next
# collective (torch 2.11, ProcessGroupNCCL.cpp, kWatchdogThreadSleepMillis). Taking that many bytes of
# states from the driver and stepping them the first time is longer: 32 GB let go, 14 GB did not.
_WATCHED_BYTES = 20 * GIB_BYTES


class DdpReplay(EngineBase):
    """One bucket for the whole model up to the first reduction, the lasting ones from then on."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: TrainingWorkload,
        parallelism: Parallelism,
        memory: Memory,
        workspaces_bytes: int,
    ) -> None:
        super().__init__(spec, workload, memory, workspaces_bytes)
        sizes = Precisions.of(workload.precision, parallelism.engine)
        trained = trained_groups(spec, workload)
        pairs = model_order(spec, sizes.state, trained)
        every = in_order(trained.whole_shapes(), sizes.state) if trained else pairs
        four_bit = trained.four_bit_shapes if trained else ()
        self._four_bit = [prod(shape) for layer in four_bit for shape in layer]
        self._parameters = [tensor.numel * sizes.parameter for _, tensor in every]
        self._gradients = [tensor.numel * sizes.gradient for _, tensor in pairs]
        if parallelism.zero_stage == 1:
            pairs = owned(spec, sizes.state, parallelism.world_size, trained=trained)
        self._stepped = [tensor for _, tensor in pairs]
        self._has_reduced, self._is_rebuilt = False, False
        self._ranks = parallelism.world_size

    def start(self) -> None:
        """Parameters one by one, their broadcast, one bucket of all gradients."""
        memory = self._memory
        self._quantise()
        for number, size_bytes in enumerate(self._parameters):
            memory.take(("parameter", number), size_bytes)
        if self._tied:
            # Until it is tied again, the head has a tensor of its own.
            memory.take("untied", self._parameters[0])
            memory.give("untied")
        self._broadcast([-(-numel // 2) for numel in self._four_bit])
        self._broadcast(self._parameters)
        memory.take(_FIRST_BUCKET, sum(self._gradients))
        self._take_tokens()

    def _quantise(self) -> None:
        """Fill each 4-bit weight from a whole one in bf16 (runners/engines/four_bit.py)."""
        for number, numel in enumerate(self._four_bit):
            self._memory.take("whole", numel * _BF16_BYTES)
            for name, size_bytes in nf4_tensors(numel).items():
                self._memory.take(("parameter", name, number), size_bytes)
            self._memory.give("whole")

    def _broadcast(self, sizes_bytes: Sequence[int]) -> None:
        """Broadcast tensors of one element type."""
        pieces: list[list[int]] = [[]]
        for size_bytes in sizes_bytes:
            pieces[-1].append(size_bytes)
            if sum(pieces[-1]) >= _BROADCAST_BYTES:
                pieces.append([])
        # A piece of one tensor is a view of it.
        flat = [sum(piece) if len(piece) > 1 else 0 for piece in pieces if piece]
        for number, size_bytes in enumerate(flat):
            self._memory.give(("piece", number - _IN_FLIGHT))
            self._memory.take(("piece", number), size_bytes)
        self._memory.give(*(("piece", number) for number in range(len(flat))))

    def before(self, section: str, layer: int) -> None:
        """Before the forward after the first reduction, order buckets as gradients were ready."""
        if section == "embed" and self._has_reduced and not self._is_rebuilt:
            self._rebuild_buckets()
            self._is_rebuilt = True
        self._take_workspace(section)

    def _rebuild_buckets(self) -> None:
        memory = self._memory
        begins_step = self._workload.grad_accumulation == 1 or not self.reduces_each
        if begins_step and (self._ranks == 1 or self._states_bytes() > _WATCHED_BYTES):
            memory.give(_FIRST_BUCKET)
        for number, size_bytes in enumerate(bucket_bytes(self._gradients[::-1])):
            memory.take(("bucket", number), size_bytes)
        if self._ranks == 1:
            memory.give(_FIRST_BUCKET)  # gradients of a micro-batch were copied out of it

    def _states_bytes(self) -> int:
        """Bytes of the states that the first step made."""
        kind = self._workload.optimizer
        return sum(s.size_bytes for tensor in self._stepped for s in tensor_states(kind, tensor))

    def first_gradient(self, group: int, layer: int) -> None:
        """Nothing: the buckets are there already."""

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Nothing, where gradients were copied into their buckets one by one.

        Gradients that wait for a later micro-batch to be reduced are tensors beside the buckets.
        """
        if section == "loss_backward" and self._reduces:
            if self._has_reduced:
                # NCCL holds what it reduced until a later collective (ProcessGroupNCCL.hpp,
                # TensorShelf: DDP waits for the future, not for the work that would let go).
                self._memory.give(_FIRST_BUCKET)
            self._has_reduced = True
        if section == "loss_backward" and not self._reduces:
            self._memory.take("beside", sum(self._gradients))
        elif section == "embed_backward" and self._reduces:
            self._memory.give("beside")

    def optimizer_step(self) -> None:
        """Step this rank's parameters; the buckets stay."""
        self._clip(len(self._gradients))
        self._step_tensors("all", self._stepped)
